// Tables of five rows and more are sorted by a click, or Enter, on a heading.
document.addEventListener("DOMContentLoaded", () => {
  const number = (text) => {
    const found = text.replace(/,/g, "").match(/^[^0-9-]{0,2}(-?[0-9.]+(?:e[-+]?[0-9]+)?)/i);
    return found ? Number(found[1]) : NaN;
  };
  for (const table of [...document.querySelectorAll("article table.docutils")].filter((each) => each.tHead && each.tBodies[0]?.rows.length > 4)) {
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
