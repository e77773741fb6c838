// Show figures under the pointer. The page is complete without this script: every chart has a table.
"use strict";
(() => {
  const numbers = (text) => text.split(",").map(Number);

  const written = (value, kind) => {
    if (kind === "percent") return (100 * value).toFixed(1) + "%";
    if (kind === "time") {
      if (value < 60) return value.toFixed(value < 10 ? 1 : 0) + " s";
      return value < 3600 ? Math.floor(value / 60) + " min " + Math.round(value % 60) + " s" : (value / 3600).toFixed(1) + " h";
    }
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  };

  // Return the value on the axis for a coordinate of the chart.
  const value = (point, [low, high, start, end], log) => {
    const part = (point - start) / (end - start);
    return log ? Math.pow(10, Math.log10(low) + part * Math.log10(high / low)) : low + part * (high - low);
  };

  const nearest = (points, x) => points.reduce((best, each) => (Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best));

  const row = (curve, text) => {
    const line = document.createElement("div"), key = document.createElement("i"), strong = document.createElement("b");
    key.className = "key " + [...curve.classList].filter((name) => name !== "curve").join(" ");
    strong.textContent = text;
    line.append(key, curve.dataset.name, strong);
    return line;
  };

  for (const plot of document.querySelectorAll(".plot")) {
    const svg = plot.querySelector("svg"), tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
    const across = numbers(svg.dataset.x), up = numbers(svg.dataset.y), log = svg.dataset.log === "1";
    const curves = [...svg.querySelectorAll("polyline")].map((curve) => [curve, curve.getAttribute("points").split(" ").map(numbers)]);

    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const x = Math.min(Math.max(((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width, across[2]), across[3]);
      const head = svg.dataset.xname + " " + written(value(x, across, false), svg.dataset.xname);
      tip.replaceChildren(head, ...curves.map(([curve, points]) => row(curve, written(value(nearest(points, x)[1], up, log), svg.dataset.kind))));
      tip.hidden = false;
      const isRight = x > (across[2] + across[3]) / 2;
      tip.style.left = isRight ? "auto" : (100 * x) / svg.viewBox.baseVal.width + 3 + "%";
      tip.style.right = isRight ? 103 - (100 * x) / svg.viewBox.baseVal.width + "%" : "auto";
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    };
    const hide = () => {
      tip.hidden = true;
      cursor.setAttribute("x1", -9);
      cursor.setAttribute("x2", -9);
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }
})();
