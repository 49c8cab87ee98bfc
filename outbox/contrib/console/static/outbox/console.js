// Updates the page, shows since when it is out of date, and draws diagrams.
"use strict";

(() => {
  const { every, check, checkEvery } = document.getElementById("main").dataset;
  const EVERY = Number(every) * 1000;
  // A part is out of date after its interval, plus the time that an answer usually takes.
  const STALE = 1.4 * EVERY;
  const PATIENCE = 10000;
  // The server is asked this often whether something has changed. It must answer within two intervals.
  const CHECK_EVERY = Number(checkEvery) * 1000;
  const pause = document.getElementById("pause");
  const announce = document.getElementById("announce");
  const charts = [...document.querySelectorAll(".chart")];
  const feeds = [];
  let paused = false;

  // On a phone the lists of pages and states scroll sideways.
  for (const current of document.querySelectorAll("nav [aria-current]")) {
    const list = current.closest("ul");
    list.scrollLeft = current.offsetLeft - list.offsetLeft - (list.clientWidth - current.offsetWidth) / 2;
  }

  // -- live parts -------------------------------------------------------------------------------------

  // One address, the elements that show its last answer, and why they show nothing newer.
  // `take` gets the text of an answer; it returns a problem, or nothing.
  function feed(address, elements, before, take) {
    const note = document.createElement("p");
    note.className = "stale-note";
    note.setAttribute("role", "status");
    note.hidden = true;
    before.before(note);
    feeds.push({ address, elements, note, take, at: Date.now(), problem: "", isAsking: false, isBehind: false });
  }

  function isTyping() {
    const focused = document.activeElement;
    return focused !== null && (focused.isContentEditable || /^(INPUT|SELECT|TEXTAREA)$/.test(focused.nodeName));
  }

  function isSelecting({ elements }) {
    const selection = document.getSelection();
    return Boolean(selection) && !selection.isCollapsed && elements.some((one) => one.contains(selection.anchorNode));
  }

  // Why a feed is not requested now, or an empty text.
  function rest(one) {
    if (paused) return "updates are paused";
    if (document.hidden) return "the page was hidden";
    return isSelecting(one) ? "text in it is selected" : "";
  }

  function time(at) {
    const date = new Date(at);
    const text = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
    return date.toDateString() === new Date().toDateString() ? text : `${date.toLocaleDateString()} ${text}`;
  }

  function show(one) {
    const isStale = one.problem !== "" || (one.isBehind && rest(one) !== "") || Date.now() - one.at >= STALE;
    const reason = one.problem || rest(one) || "the server does not answer";
    const text = isStale ? `Not updated since ${time(one.at)}: ${reason}.` : "";
    for (const element of one.elements) element.classList.toggle("stale", isStale);
    one.note.hidden = !isStale;
    if (one.note.textContent !== text) one.note.textContent = text;
  }

  // Ask the server, and give the answer to `take`. Return the problem, or an empty text. Do not follow a redirect: it
  // leads to the login page, which needs the whole window.
  async function ask(address, patience, take) {
    try {
      const answer = await fetch(address, {
        headers: { "Outbox-Part": "true" },
        cache: "no-store",
        redirect: "manual",
        signal: AbortSignal.timeout(patience),
      });
      if (answer.type === "opaqueredirect") return leave();
      if (!answer.ok) return `the server answers with ${answer.status}`;
      return take(await answer.text()) ?? "";
    } catch (error) {
      if (error instanceof SyntaxError) return "the server answers with unexpected content";
      return error.name === "TimeoutError" ? "the server does not answer" : "the server cannot be reached";
    }
  }

  function leave() {
    if (!isTyping()) location.reload();
    return "the session has ended; reload the page to log in";
  }

  async function keepUp(one) {
    clearTimeout(one.timer);
    if (one.isAsking) return;
    if (!rest(one)) {
      one.isAsking = true;
      one.problem = await ask(one.address, PATIENCE, one.take);
      if (!one.problem) {
        one.at = Date.now();
        one.isBehind = false;
      }
      one.isAsking = false;
    }
    show(one);
    one.timer = setTimeout(keepUp, EVERY, one);
  }

  // Ask whether something has changed since the page was read: it is a small question, so it is asked more often. If
  // there is no answer, nothing on the page may look healthy.
  let unanswered = "";
  async function look() {
    if (!paused && !document.hidden) {
      const before = unanswered;
      unanswered = await ask(check, 2 * CHECK_EVERY, (text) => {
        const { state, at } = JSON.parse(text);
        const isChanged = state !== document.getElementById("broker").dataset.state;
        for (const one of feeds) one.isBehind ||= isChanged;
        const looked = document.querySelector("#looked time");
        if (looked && !isChanged) looked.textContent = at;
      });
      for (const one of feeds) {
        if (unanswered) one.problem = unanswered;
        if (unanswered || one.isBehind) show(one);
        if ((before && !unanswered) || (one.isBehind && !rest(one))) keepUp(one);
      }
    }
    setTimeout(look, CHECK_EVERY);
  }

  // Make `old` like `fresh`. An unchanged element stays, so that focus, selection and an open <details> survive. A
  // focused input is left as it is. Rows are identified by their data-key.
  function morph(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    if (old === document.activeElement && isTyping()) return;
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const isLike = (one, other) => one.nodeName === other.nodeName && one.dataset?.key === other.dataset?.key;
    let place = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      let known = place;
      while (known && !isLike(known, wanted)) {
        known = wanted.nodeType === Node.ELEMENT_NODE ? known.nextSibling : null;
      }
      if (known === null) {
        old.insertBefore(document.importNode(wanted, true), place);
        continue;
      }
      // Elements in between move to the end: a later step takes them from there, or the last one removes them.
      while (place !== known) {
        const next = place.nextSibling;
        old.append(place);
        place = next;
      }
      place = known.nextSibling;
      morph(known, wanted);
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
  }

  function takePage(text) {
    const live = document.getElementById("live");
    const answer = new DOMParser().parseFromString(text, "text/html");
    const fresh = answer.getElementById("live");
    if (fresh === null) return "the server answers with another page";
    const focused = document.activeElement;
    const before = live.dataset.said;
    morph(live, fresh);
    morph(document.getElementById("broker"), answer.getElementById("broker"));
    // A moved row has lost the focus: restore it. If the row is gone, focus the page instead of its beginning.
    if (focused && focused !== document.activeElement) {
      (focused.isConnected ? focused : document.getElementById("main")).focus({ preventScroll: true });
    }
    if (live.dataset.said !== before) announce.textContent = live.dataset.said;
    return "";
  }

  // -- diagrams ---------------------------------------------------------------------------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The server writes all times of a page in one time zone; the diagrams use the same.
  function knownZone(name) {
    try {
      new Intl.DateTimeFormat([], { timeZone: name });
      return name;
    } catch {
      return undefined;
    }
  }

  const timeZone = knownZone(document.getElementById("main").dataset.zone);

  function clock(seconds, second) {
    return new Date(seconds * 1000).toLocaleString([], {
      hour: "2-digit",
      minute: "2-digit",
      second,
      hourCycle: "h23",
      timeZone,
    });
  }

  // A number with at most three significant digits, or a time span.
  function amount(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit !== "seconds") return value.toLocaleString([], { maximumSignificantDigits: 3 });
    for (const [name, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (value >= 2 * length) return `${Number((value / length).toFixed(1))} ${name}`;
    }
    return `${Number(value.toFixed(value < 10 ? 2 : 0))} s`;
  }

  // Without a pointer the legend shows the newest values.
  function showNewest(plot) {
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 });
  }

  // A series has one colour on all diagrams. The dashes differ too, for readers who cannot tell the colours apart.
  const DASHES = { published: [], queued: [8, 4], handled: [], sent_back: [3, 3], dead: [12, 4, 3, 4] };

  function options(element, keys, names) {
    const { unit } = element.dataset;
    const axis = () => ({
      stroke: () => colour("--quiet"),
      grid: { stroke: () => colour("--rule"), width: 1 },
      ticks: { stroke: () => colour("--rule"), width: 1 },
    });
    return {
      width: element.clientWidth,
      height: 190,
      axes: [
        {
          ...axis(),
          space: 58,
          values: (_, moments, __, ___, step) => moments.map((at) => clock(at, step < 60 ? "2-digit" : undefined)),
        },
        { ...axis(), size: 70, values: (_, values) => values.map((value) => amount(value, unit)) },
      ],
      hooks: { setCursor: [showNewest], setData: [showNewest], ready: [showNewest] },
      scales: { x: { range: () => element.ends }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      series: [
        { label: "At", value: (_, moment) => (moment === null ? "" : clock(moment, "2-digit")) },
        ...names.map((label, index) => ({
          label,
          stroke: () => colour(`--series-${keys[index].replace("_", "-")}`),
          width: 2,
          dash: DASHES[keys[index]] ?? [],
          points: { show: false },
          value: (_, value) => amount(value, unit),
        })),
      ],
    };
  }

  function draw(element, history) {
    const keys = element.dataset.series.split(" ");
    const names = element.dataset.names.split("|");
    const data = [history.at, ...keys.map((key) => history[key])];
    // Both ends are shown, so that a time without figures is a gap there too.
    element.ends = [history.since, history.until];
    if (history.at.length === 0) {
      element.textContent = "No counts yet.";
      return;
    }
    element.setAttribute("role", "img");
    const newest = keys.map((key, index) => `${names[index]} ${amount(history[key].at(-1), element.dataset.unit)}`).join(", ");
    element.setAttribute("aria-label", `Over 15 minutes; now: ${newest}`);
    if (element.plot) {
      element.plot.setData(data);
    } else {
      element.textContent = "";
      element.plot = new uPlot(options(element, keys, names), data, element);
    }
  }

  function takeHistory(shown, text) {
    const history = JSON.parse(text);
    for (const element of shown) draw(element, history);
  }

  if (charts.length) {
    addEventListener("resize", () => {
      for (const { plot, clientWidth } of charts) plot?.setSize({ width: clientWidth, height: 190 });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const { plot } of charts) plot?.redraw();
    });
  }

  // -- keeping up -------------------------------------------------------------------------------------

  const live = document.getElementById("live");
  if (live) feed(live.dataset.address, [live], live, takePage);
  for (const address of new Set(charts.map((element) => element.dataset.history))) {
    const shown = charts.filter((element) => element.dataset.history === address);
    feed(address, shown, shown[0].closest(".charts"), (text) => takeHistory(shown, text));
  }
  // The page itself is fresh; its diagrams are not loaded yet.
  for (const one of feeds) one.timer = setTimeout(keepUp, one.elements[0] === live ? EVERY : 0, one);
  if (feeds.length) {
    setTimeout(look, CHECK_EVERY);
    setInterval(() => feeds.forEach(show), EVERY / 10);
    document.addEventListener("visibilitychange", () => document.hidden || feeds.forEach(keepUp));
    pause.hidden = false;
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.setAttribute("aria-pressed", String(paused));
      pause.textContent = paused ? "Resume updates" : "Pause updates";
      if (!paused) feeds.forEach(keepUp);
    });
  }
})();
