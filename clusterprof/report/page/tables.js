// Tables of many rows: search, sort by a column's head, filter, show all, and download as CSV.
// The rows that are not shown at first wait in a template of the table.
(() => {
  "use strict";
  const { element } = clusterprof;
  // Rows up to this number stand together, and need no search.
  const FEW = 6;

  // What a cell is sorted by: its data-value, or the first number of its text, or the text.
  const key = (cell) => {
    if (!cell) return "";
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const text = cell.textContent.trim();
    const number = parseFloat(text.replace(/^[<±+]/, "").replace(/,/g, ""));
    return Number.isNaN(number) ? text : number;
  };
  // "0-7, 12" of a column of numbers; anything else is looked for in the row's text.
  const asked = (text) => {
    const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
    const spans = parts.map((part) => /^(\d+)(?:[-–](\d+))?$/.exec(part));
    if (parts.length && spans.every(Boolean)) {
      return (row) => spans.some(([, low, high = low]) => Number(row.cells[0].textContent) >= Number(low) && Number(row.cells[0].textContent) <= Number(high));
    }
    const wanted = text.toLowerCase();
    return (row) => row.textContent.toLowerCase().includes(wanted);
  };

  for (const holder of document.querySelectorAll(".ranked")) {
    const table = holder.querySelector("table"), body = table.tBodies[0];
    const template = body.querySelector("template"), between = body.querySelector(".between");
    const first = [...body.rows].filter((row) => row !== between);
    const initial = [...body.children], words = between && between.cells[0].textContent;
    let every = null, order = null, descending = false;
    // All rows in the order of the page; those of the template come between.
    const rows = () => {
      if (!every) {
        const middle = template ? [...template.content.cloneNode(true).querySelectorAll("tr")] : [];
        const at = between ? initial.indexOf(between) : first.length;
        every = [...first.slice(0, at), ...middle, ...first.slice(at)];
      }
      return every;
    };
    const count = first.length + (template ? template.content.querySelectorAll("tr").length : 0);
    if (count <= 1) continue;

    const search = element("input", { type: "search", placeholder: `search: ${holder.dataset.noun === "rank" ? "0-7, 12 or text" : "text"}` });
    search.setAttribute("aria-label", "search in this table");
    const all = element("input", { type: "checkbox" }), named = element("input", { type: "checkbox" });
    const told = element("small", {});
    told.setAttribute("aria-live", "polite");
    const tools = element("div", { className: "tools" });
    if (count > FEW) tools.append(search);
    if (between) tools.append(element("label", {}, all, ` show all ${count.toLocaleString("en")}`));
    if (holder.dataset.named !== undefined && count > FEW) tools.append(element("label", {}, named, " only ranks that findings name"));
    const csv = element("button", { type: "button", className: "csv", textContent: "download CSV" });
    csv.setAttribute("aria-label", `download CSV: ${holder.querySelector(".box").getAttribute("aria-label")}`);
    tools.append(told);
    if (tools.childElementCount > 1) holder.prepend(tools);
    holder.append(csv);

    const show = () => {
      const untouched = !all.checked && !search.value.trim() && !named.checked && order === null;
      if (between) between.cells[0].textContent = words;
      if (untouched) {
        body.replaceChildren(...initial);
        told.textContent = "";
        return;
      }
      let shown = rows().slice();
      if (search.value.trim()) shown = shown.filter(asked(search.value.trim()));
      if (named.checked) shown = shown.filter((row) => row.classList.contains("named"));
      if (order !== null) {
        const keys = new Map(shown.map((row) => [row, key(row.cells[order])]));
        shown.sort((one, other) => {
          const [a, b] = [keys.get(one), keys.get(other)];
          const by = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
          return descending ? -by : by;
        });
      }
      const found = shown.length, few = between && !all.checked && !search.value.trim() && !named.checked;
      if (few && found > 16) {
        between.cells[0].textContent = `${(found - 16).toLocaleString("en")} more ${holder.dataset.noun}s between these`;
        shown = [...shown.slice(0, 8), between, ...shown.slice(-8)];
      }
      body.replaceChildren(...shown);
      told.textContent = search.value.trim() || named.checked ? `${found} of ${count}` : "";
    };
    let waiting = 0;
    search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(show, 80); });
    all.addEventListener("change", show);
    named.addEventListener("change", show);

    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (head.classList.contains("plain") || head.classList.contains("words")) return;
      const button = element("button", { type: "button", className: "sort" });
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        // numbers from the largest on first, texts and ranks from the first
        const number = column > 0 && typeof key(rows()[0].cells[column]) === "number";
        if (order === column) descending = !descending;
        else [order, descending] = [column, number];
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        show();
      });
    });

    csv.addEventListener("click", () => {
      const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
      const lines = rows().map((row) => [...row.cells].map((cell) => {
        const title = cell.querySelector("svg title");
        const part = cell.querySelector(".part");
        return title ? title.textContent : part ? cell.firstChild.textContent : cell.title || cell.textContent;
      }));
      clusterprof.download(`${holder.querySelector(".box").getAttribute("aria-label").replace(/\W+/g, "-")}.csv`, clusterprof.csv([heads, ...lines]), "text/csv");
    });
  }
})();
