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

function readable(svg) {
  const lines = [...svg.querySelectorAll("path[data-label]")].map((path) => ({
    label: path.dataset.label,
    points: path.getAttribute("d").split(/[ML]/).filter(Boolean).map((pair) => pair.split(" ").map(Number)),
  }));
  if (!lines.length) return;
  const [x0, x1] = svg.dataset.x.split(" ").map(Number);
  const [y0, y1] = svg.dataset.y.split(" ").map(Number);
  const frame = { left: 44, right: 388, top: 16, bottom: 194 };
  const box = document.createElement("div");
  box.className = "readout";
  const number = (y) => {
    const share = (frame.bottom - y) / (frame.bottom - frame.top);
    const value = "log" in svg.dataset ? y0 * (y1 / y0) ** share : y0 + share * (y1 - y0);
    return `${Number(value.toPrecision(4))} ${svg.dataset.unit}`.trim();
  };
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * 400;
    const nearest = lines.map((line) => ({
      label: line.label,
      point: line.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a), [1e9, 0]),
    })).filter((line) => line.point[0] < 1e9);
    if (!nearest.length) return;
    const at = nearest.reduce((a, b) => (Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a)).point[0];
    const step = Math.round(x0 + ((at - frame.left) / (frame.right - frame.left)) * (x1 - x0));
    const close = nearest.filter((line) => Math.abs(line.point[0] - at) < 12).slice(0, 12);
    box.textContent = [`step ${step}`, ...close.map((line) => `${line.label}  ${number(line.point[1])}`)].join("\n");
    svg.parentElement.append(box);
    const room = svg.parentElement.getBoundingClientRect();
    const left = event.clientX - room.left + 14;
    box.style.left = `${Math.min(left, room.width - box.offsetWidth - 4)}px`;
    box.style.top = `${event.clientY - room.top + 16}px`;
  });
  svg.addEventListener("pointerleave", () => box.remove());
}

function zoomable(image, dialog) {
  image.addEventListener("click", () => {
    const copy = image.cloneNode();
    dialog.replaceChildren(copy);
    dialog.showModal();
  });
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".chart > svg").forEach(readable);
const dialog = document.createElement("dialog");
dialog.setAttribute("aria-label", "picture");
dialog.addEventListener("click", () => dialog.close());
document.body.append(dialog);
document.body.classList.add("zooms");
document.querySelectorAll(".picture img").forEach((image) => zoomable(image, dialog));
