// What the search prefers: pages for users before those for developers, titles before
// words in a text.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) => {
    if (/^(design|benchmarks|contributing)/.test(docname)) return score - 30;
    if (/^(reference|index)/.test(docname)) return score - 8;
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
