// What the search prefers: pages for users before those for developers, titles before
// words in a text, and for these words the page that is about them.
const ABOUT = {
  bridges: "pytorch autograd sympy",
  buffers: "numba cupy dlpack ctypes zero-copy machine native",
  errors: "exception raise fail traceback",
  feeding: "loader dataset batches data",
  gpu: "cuda nvidia",
  index: "install pip",
  objects: "gymnasium environment simulator state",
  pools: "parallel workers dask ray joblib",
  taps: "log print every",
  waiting: "async timeout http server",
  watches: "nan inf debugger breakpoint",
};
const asked = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/\W+/);
const isAbout = (docname) => {
  const words = [docname, ...(ABOUT[docname] ?? "").split(" ")];
  return asked.filter((a) => a && words.some((w) => w.startsWith(a.slice(0, 4)))).length;
};

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) => {
    score += 12 * isAbout(docname);
    if (/^(design|benchmarks|contributing)/.test(docname)) return score - 30;
    if (/^(reference|index|gallery|errors\/)/.test(docname)) return score - 8;
    // A page of its own before a section of another one.
    return anchor ? score - 3 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 25,
  partialTitle: 15,
  term: 5,
  partialTerm: 2,
};
