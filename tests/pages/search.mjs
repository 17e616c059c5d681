// Asks the search of a built site, as its page search.html does, without a browser:
// node search.mjs SITE '["early stopping", ...]' prints the pages found, best first.
import { readFileSync } from "node:fs";
import { createContext, Script } from "node:vm";

const [site, questions] = process.argv.slice(2);
const scripts = ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"].map(
  (name) => new Script(readFileSync(`${site}/${name}`, "utf8"), { filename: name }),
);

const ask = (q) => {
  const page = createContext({
    URLSearchParams,
    location: { search: `?${new URLSearchParams({ q })}` },
    document: { getElementById: () => null },
    SPHINX_HIGHLIGHT_ENABLED: false,
    _: (text) => text,
    _ready: () => {},
    q,
  });
  page.window = page;
  for (const script of scripts) script.runInContext(page);
  const found = new Script("Search._performSearch(...Search._parseQuery(q))").runInContext(page);
  return [...new Set(found.reverse().map(([docname]) => docname))];
};

console.log(JSON.stringify(JSON.parse(questions).map(ask)));
