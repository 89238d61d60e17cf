// Tables of five rows and more are sorted by a click, or Enter, on a heading.
document.addEventListener("DOMContentLoaded", () => {
  const units = { KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, ms: 1e-3, "GB/s": 1e9, "TB/s": 1e12, "TFLOP/s": 1e12, "PFLOP/s": 1e15 };
  // 1,176 and 3.4e-07 and 0.25 (1.00) and 417 MB, but no date.
  const number = (text) => {
    const found = text.replace(/,/g, "").match(/^[^0-9-]{0,2}(-?[0-9.]+(?:e[-+]?[0-9]+)?)(?![-0-9]) ?(\S*)/i);
    return found ? Number(found[1]) * (units[found[2]] ?? 1) : NaN;
  };
  for (const table of [...document.querySelectorAll("article table.docutils:not(#explorer-table)")].filter((each) => each.tHead && each.tBodies[0]?.rows.length > 4)) {
    const body = table.tBodies[0];
    table.querySelectorAll("thead th").forEach((heading, column) => {
      if (!heading.textContent.trim() || heading.querySelector("a")) return;
      heading.dataset.sort = "";
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [row.cells[column]?.textContent.trim() ?? "", row]);
        rows.sort(([a], [b]) => {
          const difference = number(a) - number(b);
          const order = Number.isNaN(difference) ? a.localeCompare(b) : difference;
          return down ? -order : order;
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }
});
