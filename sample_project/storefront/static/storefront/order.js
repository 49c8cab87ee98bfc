// Updates the order page until all four states have arrived. Without the script the page reloads itself.
"use strict";
(() => {
  const box = document.getElementById("progress");
  const steps = () => box.querySelector(".steps").dataset;
  let pause = 250;
  const look = async () => {
    try {
      const answer = await fetch(box.dataset.url, { headers: { Accept: "text/html" } });
      if (answer.ok) {
        const html = await answer.text();
        // Write only a change: otherwise screen readers would read the same list repeatedly.
        if (html !== shown) box.innerHTML = shown = html;
      }
    } catch {
      // The site may be restarting: try again.
    }
    if (steps().complete === "true") return;
    pause = Math.min(pause * 1.15, 3000);
    setTimeout(look, pause);
  };
  let shown = box.innerHTML;
  if (steps().paid === "true" && steps().complete === "false") setTimeout(look, pause);
})();
