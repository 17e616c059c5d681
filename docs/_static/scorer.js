// What the search prefers: the page that is about what was asked (docs/_ext/words.py),
// pages for users before those for developers, titles before words in a text.
const asked = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().trim();
const wordsOf = (text) => text.split(/[^\p{Letter}\p{Number}_]+/u).filter((word) => word);
const words = wordsOf(asked);

// 60 for a page about just what was asked, else up to 20 by the share of words it is about.
const about = (docname) => {
  const entries = (ABOUT[docname] ?? []).map((entry) => entry.toLowerCase());
  if (entries.includes(asked)) return 60;
  const known = wordsOf([docname, ...entries].join(" "));
  const met = words.filter((word) => known.some((k) => k.startsWith(word.slice(0, 5))));
  return words.length ? (20 * met.length) / words.length : 0;
};

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    score += about(docname);
    if (/^(benchmarks|contributing|changelog)/.test(docname)) return score - 30;
    // A name that is written as in code is looked for in the reference.
    if (/^(hc|hostcall)\./.test(asked)) return score + (docname.startsWith("reference") ? 20 : 0);
    if (/^(reference|index|gallery|errors\/)/.test(docname)) return score - 8;
    // A page of its own before a section of another one.
    return anchor ? score - 3 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 2,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 25,
  partialTitle: 15,
  term: 5,
  partialTerm: 2,
};
