"use strict";
const curves = JSON.parse(document.getElementById("curves").textContent);
const darkness = matchMedia("(prefers-color-scheme: dark)");

function draw() {
  const ink = darkness.matches ? "#98a3ad" : "#5b6670";
  const line = darkness.matches ? "#343b42" : "#e6eaed";
  for (const [index, figure] of curves.entries()) {
    const layout = structuredClone(figure.layout);
    layout.font.color = ink;
    for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, { gridcolor: line, zerolinecolor: line });
    Plotly.react("curve-" + index, figure.data, layout, { displayModeBar: false, responsive: true });
  }
}

function filter() {
  const change = document.getElementById("change").value;
  const words = document.getElementById("words").value.toLowerCase();
  for (const group of document.querySelectorAll("details[data-change]")) {
    const wanted = change === "all" || group.dataset.change.split(" ").includes(change);
    group.hidden = !(wanted && group.textContent.toLowerCase().includes(words));
  }
}

draw();
darkness.addEventListener("change", draw);
if (document.getElementById("change")) {
  document.getElementById("change").addEventListener("input", filter);
  document.getElementById("words").addEventListener("input", filter);
}
