// What htmx does not do: pausing what is live, saying aloud what has changed, and drawing diagrams.
"use strict";

(() => {
  const EVERY = 5000;
  const pause = document.getElementById("pause");
  const announce = document.getElementById("announce");
  const charts = [...document.querySelectorAll(".chart")];
  let paused = false;

  // -- what is live -----------------------------------------------------------------------------------

  function said() {
    return document.getElementById("live")?.dataset.said ?? "";
  }

  if (document.getElementById("live") || charts.length) {
    pause.hidden = false;
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.setAttribute("aria-pressed", String(paused));
      pause.textContent = paused ? "Go on updating" : "Pause updates";
    });
  }

  // Nothing is replaced while nobody looks, and never under what is being read, chosen or typed.
  function atRest() {
    const live = document.getElementById("live");
    const selection = document.getSelection();
    const isSelecting = selection && !selection.isCollapsed && live?.contains(selection.anchorNode);
    return !paused && !document.hidden && !isSelecting && !live?.contains(document.activeElement);
  }

  document.body.addEventListener("htmx:beforeRequest", (event) => {
    if (!atRest()) event.preventDefault();
  });
  let before = said();
  document.body.addEventListener("htmx:afterSettle", () => {
    if (said() !== before) announce.textContent = before = said();
  });

  // -- diagrams ---------------------------------------------------------------------------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const clock = (seconds) =>
    new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

  // Without a pointer the legend shows the newest values.
  function showNewest(plot) {
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 });
  }

  function options(element, names) {
    const axis = () => ({
      stroke: () => colour("--quiet"),
      grid: { stroke: () => colour("--rule"), width: 1 },
      ticks: { stroke: () => colour("--rule"), width: 1 },
    });
    return {
      width: element.clientWidth,
      height: 190,
      axes: [{ ...axis(), values: (_, moments) => moments.map(clock) }, { ...axis(), size: 60 }],
      hooks: { setCursor: [showNewest], setData: [showNewest], ready: [showNewest] },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      series: [
        { label: "At", value: (_, moment) => (moment === null ? "" : clock(moment)) },
        ...names.map((label, index) => ({
          label,
          stroke: () => colour(`--series-${index + 1}`),
          width: 2,
          dash: [[], [8, 4], [3, 3], [12, 4, 3, 4]][index],
          points: { show: false },
        })),
      ],
    };
  }

  function draw(element, history) {
    const keys = element.dataset.series.split(" ");
    const names = element.dataset.names.split("|");
    const data = [history.at, ...keys.map((key) => history[key])];
    if (history.at.length === 0) {
      element.textContent = "Nothing has been counted yet.";
      return;
    }
    element.setAttribute("role", "img");
    const newest = keys.map((key, index) => `${names[index]} ${history[key].at(-1)}`).join(", ");
    element.setAttribute("aria-label", `Over a quarter of an hour; now: ${newest}`);
    if (element.plot) {
      element.plot.setData(data);
    } else {
      element.textContent = "";
      element.plot = new uPlot(options(element, names), data, element);
    }
  }

  async function refresh() {
    const found = new Map();
    for (const element of charts) {
      const address = element.dataset.history;
      if (!found.has(address)) {
        const answer = await fetch(address, { headers: { Accept: "application/json" } });
        found.set(address, answer.ok ? await answer.json() : null);
      }
      if (found.get(address)) draw(element, found.get(address));
      else if (!element.plot) element.textContent = "It cannot be read at the moment.";
    }
  }

  async function keepDrawing() {
    if (!paused && !document.hidden) await refresh().catch(() => {});
    setTimeout(keepDrawing, EVERY);
  }

  if (charts.length) {
    addEventListener("resize", () => {
      for (const { plot, clientWidth } of charts) plot?.setSize({ width: clientWidth, height: 190 });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const { plot } of charts) plot?.redraw();
    });
    keepDrawing();
  }
})();
