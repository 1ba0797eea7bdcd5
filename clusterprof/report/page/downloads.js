// Files that the page itself holds: CSV of its tables, and results.json whole.
(() => {
  "use strict";
  const { element } = clusterprof;
  clusterprof.download = (name, content, type) => {
    const address = URL.createObjectURL(new Blob([content], { type }));
    element("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  };
  // A text that a spreadsheet would take for a formula gets an apostrophe; numbers stay numbers.
  clusterprof.csv = (rows) => rows.map((row) => row.map((cell) => {
    let text = String(cell).trim();
    if (/^[=+\-@\t]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
    return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  }).join(",")).join("\r\n") + "\r\n";
})();
