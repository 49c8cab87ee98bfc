// Draws the income per minute from the data in the page. Without the script the table shows the same figures.
"use strict";
(() => {
  const box = document.getElementById("income-plot");
  if (!box) return;
  const { times, income } = JSON.parse(document.getElementById("income-data").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = () => ({ stroke: color("--quiet"), grid: { stroke: color("--rule") }, ticks: { stroke: color("--rule") } });
  const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 16);
  const size = () => ({ width: box.clientWidth, height: 260 });
  const plot = new uPlot(
    {
      ...size(),
      scales: {
        x: { range: (u, from, to) => [from - 60, to + 60] },
        y: { range: (u, from, to) => [0, Math.max(to, 1) * 1.1] },
      },
      legend: { show: false },
      axes: [{ ...axis(), incrs: [60, 300, 600, 1800], values: (u, marks) => marks.map(clock) }, { ...axis(), size: 64, values: (u, marks) => marks.map((mark) => `€ ${mark}`) }],
      series: [
        {},
        {
          label: "Income",
          stroke: color("--ink"),
          fill: color("--ink"),
          paths: uPlot.paths.bars({ size: [0.7, 40] }),
          points: { show: false },
        },
      ],
    },
    [times, income],
    box,
  );
  addEventListener("resize", () => plot.setSize(size()));
})();
