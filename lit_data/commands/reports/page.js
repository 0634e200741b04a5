// For comfort only: the page says the same without it. Sorting, numbers under the pointer, larger pictures.
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

function readable(image) {
  const chart = JSON.parse(image.dataset.chart);
  const lines = chart.lines.filter((line) => line.points.length);
  if (!lines.length) return;
  const [left, right] = chart.frame, [first, last] = chart.steps;
  const box = document.createElement("div");
  box.className = "readout";
  image.addEventListener("pointermove", (event) => {
    const area = image.getBoundingClientRect();
    const share = ((event.clientX - area.left) / area.width - left) / (right - left);
    const step = first + share * (last - first);
    const far = (point) => Math.abs(point[0] - step);
    const nearest = lines.map((line) => [line.label, line.points.reduce((a, b) => (far(b) < far(a) ? b : a))]);
    const at = nearest.reduce((a, b) => (far(b[1]) < far(a[1]) ? b : a))[1][0];
    const close = nearest.filter((line) => Math.abs(line[1][0] - at) < 0.035 * (last - first)).slice(0, 12);
    box.textContent = [`step ${at}`, ...close.map(([label, point]) => `${label}  ${point[1]}`)].join("\n");
    image.parentElement.append(box);
    const room = image.parentElement.getBoundingClientRect();
    box.style.left = `${Math.min(event.clientX - room.left + 14, room.width - box.offsetWidth - 4)}px`;
    box.style.top = `${event.clientY - room.top + 16}px`;
  });
  image.addEventListener("pointerleave", () => box.remove());
}

function zoomable(image, dialog) {
  image.addEventListener("click", () => {
    const copy = image.cloneNode();
    dialog.replaceChildren(copy);
    dialog.showModal();
  });
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".chart > img").forEach(readable);
const dialog = document.createElement("dialog");
dialog.setAttribute("aria-label", "picture");
dialog.addEventListener("click", () => dialog.close());
document.body.append(dialog);
document.body.classList.add("zooms");
document.querySelectorAll(".picture img").forEach((image) => zoomable(image, dialog));
