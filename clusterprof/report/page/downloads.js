// Files that the page itself holds: results.json whole, its parts and the tables as CSV, and the
// timeline as a trace that Perfetto opens.
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
    let text = String(cell ?? "").trim();
    if (/^[=+\-@\t]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  }).join(",")).join("\r\n") + "\r\n";

  const data = clusterprof.data("results-data"), place = document.getElementById("downloads");
  if (!data || !place || !window.DecompressionStream) return;
  const unpacked = async () => {
    const bytes = Uint8Array.from(atob(data.gzip), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  // Rows of objects as a table: one column for each key of the first.
  const table = (rows) => [Object.keys(rows[0] ?? {}), ...rows.map((row) => Object.values(row))];
  const steps = (results) => table(results.steps.flatMap((step) => {
    const { ranks, begin_ns, duration_ns, ...whole } = step;
    return ranks.map((rank) => ({ ...whole, ...rank }));
  }));
  const findings = (results) => table(results.findings.map(({ code, severity, ranks, steps, recurrence, saved_ns_per_step, saved_alone_ns, saved_least_ns, saved_most_ns, saved_uncertainty_ns, share_of_step, confidence, summary, advice, next }) =>
    ({ code, severity, ranks: ranks.join(" "), steps: steps.join(" "), recurrence, saved_ns_per_step, saved_alone_ns, saved_least_ns, saved_most_ns, saved_uncertainty_ns, share_of_step, confidence, summary, advice, next })));
  const files = [
    [data.name, "application/json", (text) => text],
    ["findings.csv", "text/csv", (text) => clusterprof.csv(findings(JSON.parse(text)))],
    ["steps.csv", "text/csv", (text) => clusterprof.csv(steps(JSON.parse(text)))],
    ["collectives.csv", "text/csv", (text) => clusterprof.csv(table(JSON.parse(text).collectives.by_operation))],
  ];
  const timeline = ["trace.json", "application/json", () => clusterprof.trace(), " (Perfetto)"];
  if (document.getElementById("timeline-data")) files.push(timeline);
  for (const [name, type, made, use = ""] of files) {
    const button = element("button", { type: "button", textContent: name + use });
    button.addEventListener("click", async () => clusterprof.download(name, made(await unpacked()), type));
    place.append(button);
  }
})();
