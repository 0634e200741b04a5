// For comfort only: the page says the same without it. Sorting and larger pictures.
"use strict";

function sortable(table) {
  const titles = [...table.tHead.rows[0].cells];
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const falls = title.getAttribute("aria-sort") === "ascending";
      titles.forEach((other) => other.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].sort((a, b) =>
        key(a).localeCompare(key(b), undefined, { numeric: true }) || a.rowIndex - b.rowIndex);
      const numbers = rows.every((row) => key(row) === "-" || Number.isFinite(Number(key(row))));
      if (numbers) rows.sort((a, b) => Number(key(a)) - Number(key(b)));
      table.tBodies[0].append(...(falls ? rows.reverse() : rows));
    });
  });
}

function zoomable(image, dialog) {
  image.addEventListener("click", () => {
    const copy = image.cloneNode();
    dialog.replaceChildren(copy);
    dialog.showModal();
  });
}

document.querySelectorAll("table.sortable").forEach(sortable);
const dialog = document.createElement("dialog");
dialog.setAttribute("aria-label", "picture");
dialog.addEventListener("click", () => dialog.close());
document.body.append(dialog);
document.body.classList.add("zooms");
document.querySelectorAll(".picture img").forEach((image) => zoomable(image, dialog));
