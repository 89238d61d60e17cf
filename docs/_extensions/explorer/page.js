// Draws what the library computed when the page was built; the address keeps the settings, so that a view can be shared.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const at = (name) => document.getElementById(`explorer-${name}`);
  const chosen = { mask: "causal", layout: "zigzag", route: "ring", ranks: "4", link: "8", hop: 0 };
  const labels = { mask: "Mask", layout: "Layout", route: "Route", ranks: "Ranks", link: "Link" };
  const links = data.choices.link.map(([value]) => value);
  let timer = null;

  // What core says of the settings that are chosen: a row per rank, its steps in order. Steps are hops; where tokens are
  // traded for heads, the trade is the first one and the trade back is the last. The ranks of a group compute alike, each
  // for its heads; where nothing is traded a rank is a group of its own.
  function setting() {
    const [layout, found, passesQueries, groups, groupLayout, heads, pairTime] =
      data.settings[[chosen.mask, chosen.layout, chosen.route, chosen.ranks].join("|")];
    const link = links.indexOf(chosen.link);
    const isTraded = groups !== undefined;
    const rows = data.layouts[layout].map((positions, rank) => {
      const [hops, sends, waits] = found[rank];
      const wait = data.waits[waits[link]];
      const group = isTraded ? groups.findIndex((members) => members.includes(rank)) : rank;
      return {
        rank, positions, group, place: isTraded ? groups[group].indexOf(rank) : 0, lastWait: wait[wait.length - 1],
        hops: hops.map((number, index) => {
          const [owner, tokens, pairs, tiles] = data.hops[number];
          return { owner, tokens, pairs, tiles, sends: data.sends[sends[index]], wait: wait[index] };
        }),
      };
    });
    const steps = rows[0].hops.length;
    return {
      rows, passesQueries, isTraded, heads, pairTime: pairTime ?? 1,
      groups: groups ?? rows.map((row) => [row.rank]),
      blocks: data.layouts[groupLayout ?? layout],
      lastHop: steps - (isTraded ? 3 : 1),
      names: [...Array(steps).keys()].map((step) =>
        !isTraded ? `hop ${step}` : step === 0 ? "trade" : step === steps - 1 ? "trade back" : `hop ${step - 1}`),
    };
  }

  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const shown = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 1 });
  const bytes = (number) => number < 1e6 ? `${shown(number / 1e3)} KB` : `${shown(number / 1e6)} MB`;
  const colour = (rank) => data.colours[rank];
  const swatch = (rank) => `<span class="swatch" style="background:${colour(rank)}"></span>${rank}`;
  const named = (members) => members.length > 1 ? `ranks ${members.join(", ")}` : `rank ${members[0]}`;

  // The colour of a group: a stripe for each rank, which has its share of the heads. ``box``: stripes as wide as what is
  // filled allows, or one unit of the picture for all of them.
  const fill = (members, kind) => members.length > 1 ? `url(#explorer-${kind}-${members[0]})` : colour(members[0]);
  function stripes(groups, kind) {
    const units = kind === "box" ? "objectBoundingBox" : "userSpaceOnUse";
    return groups.filter((members) => members.length > 1).map((members) =>
      `<pattern id="explorer-${kind}-${members[0]}" width="1" height="1" patternUnits="${units}" patternContentUnits="${units}">` +
      members.map((rank, place) =>
        `<rect y="${place / members.length}" width="1" height="${1 / members.length}" fill="${colour(rank)}"/>`).join("") +
      "</pattern>").join("");
  }

  const possible = () => [chosen.mask, chosen.layout, chosen.route, chosen.ranks].join("|") in data.settings;

  // Positions as runs: 0-5, 42-47.
  function runs(positions) {
    const found = [];
    for (const position of positions.filter((each) => each < data.length)) {
      const last = found[found.length - 1];
      if (last && last[1] === position - 1) last[1] = position;
      else found.push([position, position]);
    }
    const texts = found.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
    return texts.length > 4 ? [...texts.slice(0, 3), "…"].join(", ") : texts.join(", ");
  }

  // The cells of a tile as strips of neighbouring keys: a path in units of positions.
  function path(tiles, queries, keys) {
    let found = "";
    for (const [q0, q1, k0, k1, lo, hi] of tiles) {
      for (let i = 0; i < q1 - q0; i++) {
        const first = Math.max(0, i - hi), stop = Math.min(k1 - k0, i - lo + 1);
        for (let j = first; j < stop; ) {
          const begin = j;
          while (j + 1 < stop && keys[k0 + j + 1] === keys[k0 + j] + 1) j++;
          j++;
          found += `M${keys[k0 + begin]} ${queries[q0 + i]}h${j - begin}v1h${begin - j}z`;
        }
      }
    }
    return found;
  }

  function drawPairs({ rows, groups, blocks, names, passesQueries }) {
    const length = data.length, edge = 2.2;
    const svg = at("pairs");
    svg.setAttribute("viewBox", `${-edge} ${-edge} ${length + edge + 0.2} ${length + edge + 0.2}`);
    let body = `<defs>${stripes(groups, "pair")}</defs><rect class="ground" width="${length}" height="${length}"/>`;
    for (const row of rows) {
      for (const position of row.positions.filter((each) => each < length)) {
        body += `<path fill="${colour(row.rank)}" d="M${position} -1.6h1v1h-1zM-1.6 ${position}h1v1h-1z"/>`;
      }
    }
    for (const members of groups) {
      const row = rows[members[0]], mine = blocks[row.group], paint = fill(members, "pair");
      row.hops.forEach((hop, index) => {
        const block = blocks[hop.owner];
        const drawn = passesQueries ? path(hop.tiles, block, mine) : path(hop.tiles, mine, block);
        const kind = index < chosen.hop ? "earlier" : index > chosen.hop ? "ahead" : "here";
        const stroke = kind === "ahead" ? ` stroke="${paint}"` : ` fill="${paint}"`;
        if (drawn) {
          body += `<path class="${kind}"${stroke} d="${drawn}"><title>${named(members)}, ${names[index]}: ` +
            `${hop.pairs} pairs with the block of ${named(groups[hop.owner])}</title></path>`;
        }
      });
    }
    svg.innerHTML = body;
  }

  function drawRanks({ rows, groups }) {
    const svg = at("ranks"), middle = 100, radius = 66;
    svg.setAttribute("viewBox", "0 0 200 200");
    const place = (rank) => {
      const angle = (2 * Math.PI * rank) / rows.length - Math.PI / 2;
      return [middle + radius * Math.cos(angle), middle + radius * Math.sin(angle)];
    };
    let body = '<defs><marker id="explorer-tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" ' +
      'orient="auto-start-reverse"><path d="M0 0L6 3L0 6z" fill="context-stroke"/></marker>' + `${stripes(groups, "box")}</defs>`;
    for (const row of rows) {
      const hop = row.hops[chosen.hop], [x, y] = place(row.rank);
      for (const [peer, tokens, , isResult] of hop ? hop.sends : []) {
        const [toX, toY] = place(peer), long = Math.hypot(toX - x, toY - y);
        const [alongX, alongY] = [(toX - x) / long, (toY - y) / long];
        const [fromX, fromY] = [x + alongX * 22 - alongY * 4, y + alongY * 22 + alongX * 4];
        const [endX, endY] = [toX - alongX * 22 - alongY * 4, toY - alongY * 22 + alongX * 4];
        const bendX = (fromX + endX) / 2 - alongY * 10, bendY = (fromY + endY) / 2 + alongX * 10;
        const stroke = colour(isResult ? peer : groups[hop.owner][row.place]);
        const label = hop.sends.length > 3 ? "" : tokens; // of many the table has them: here they would lie on each other
        body += `<path d="M${fromX} ${fromY}Q${bendX} ${bendY} ${endX} ${endY}" fill="none" stroke="${stroke}" stroke-width="2"` +
          `${isResult ? ' stroke-dasharray="4 3"' : ""} marker-end="url(#explorer-tip)"/>` +
          `<text x="${bendX - alongY * 5}" y="${bendY + alongX * 5 + 3}" font-size="8" text-anchor="middle">${label}</text>`;
      }
      const inner = hop && hop.tokens ? fill(groups[hop.owner], "box") : "none";
      body += `<circle cx="${x}" cy="${y}" r="18" fill="none" stroke="${colour(row.rank)}" stroke-width="6"/>` +
        `<circle cx="${x}" cy="${y}" r="12" fill="${inner}" opacity="${hop && hop.pairs ? 1 : 0.35}"/>`;
      const [outX, outY] = [middle + (x - middle) * 1.42, middle + (y - middle) * 1.42];
      body += `<text x="${outX}" y="${outY + 3.5}" font-size="10" text-anchor="middle">${row.rank}</text>`;
    }
    svg.innerHTML = body;
  }

  function drawTimes({ rows, groups, names, pairTime, isTraded }) {
    const svg = at("times"), high = 14, left = 44, wide = 560;
    const ends = rows.map((row) => sum(row.hops.map((hop) => hop.wait + hop.pairs * pairTime)) + row.lastWait);
    const scale = (wide - left) / Math.max(...ends, 1);
    svg.setAttribute("viewBox", `0 0 ${wide} ${rows.length * (high + 4) + 2}`);
    let body = '<defs><pattern id="explorer-hatch" width="5" height="5" patternUnits="userSpaceOnUse" ' +
      'patternTransform="rotate(45)"><path class="hatch" d="M0 0V5"/></pattern></defs>';
    for (const row of rows) {
      const y = row.rank * (high + 4) + 1;
      let now = 0;
      const bar = (time, extra, title) => {
        if (time > 0) {
          body += `<rect x="${left + now * scale}" y="${y}" width="${time * scale}" height="${high}" ${extra}><title>${title}</title></rect>`;
        }
        now += time;
      };
      body += `<text x="0" y="${y + 11}" font-size="11">rank ${row.rank}</text>`;
      row.hops.forEach((hop, index) => {
        bar(hop.wait, 'class="waiting"', `waits ${shown(hop.wait)} units for ${isTraded && index === 1 ? "the trade" : names[index]}`);
        bar(hop.pairs * pairTime, `fill="${fill(groups[hop.owner], "box")}"${index === chosen.hop ? ' class="now"' : ""}`,
          `${names[index]}: ${shown(hop.pairs * pairTime)} units with the block of ${named(groups[hop.owner])}`);
      });
      bar(row.lastWait, 'class="waiting"', `waits ${shown(row.lastWait)} units for ${isTraded ? "the trade back" : "results"}`);
    }
    svg.innerHTML = body;
  }

  function writeNumbers({ rows, groups, heads, pairTime, lastHop, isTraded }) {
    const share = isTraded ? ` in ${heads} of ${data.heads} heads` : "";
    const inAll = rows.map((row) => sum(row.hops.map((hop) => hop.pairs)));
    const sent = rows.map((row) => sum(row.hops.flatMap((hop) => hop.sends.map((each) => each[2]))));
    const waits = rows.map((row) => sum(row.hops.map((hop) => hop.wait)) + row.lastWait);
    at("table").tBodies[0].innerHTML = rows.map((row, rank) => {
      const hop = row.hops[chosen.hop];
      const sends = hop.sends.map(([peer, tokens, , isResult]) => `${tokens} ${isResult ? "results " : ""}to ${peer}`);
      const block = hop.tokens ? `${groups[hop.owner].map(swatch).join(" ")} (${hop.tokens} tokens)` : "none";
      const cells = [swatch(rank), runs(row.positions), block, `${hop.pairs}${hop.pairs ? share : ""}`,
        sends.join(", ") || "nothing", shown(hop.wait), `${shown(inAll[rank])}${share}`, bytes(sent[rank]), shown(waits[rank])];
      return `<tr>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
    }).join("");
    const mean = sum(inAll) / rows.length;
    const ends = inAll.map((pairs, rank) => pairs * pairTime + waits[rank]);
    const once = (numbers) => sum(groups.map(([first]) => numbers[first])); // the ranks of a group have the same pairs
    const totals = {
      "pairs in all": shown(once(inAll)),
      "busiest rank over the mean": (Math.max(...inAll) / mean).toFixed(2),
      "sent by all ranks": bytes(sum(sent)),
      "whole blocks to every rank": bytes(data.length * data.blockBytes * (rows.length - 1)),
      "one pass takes": `${shown(Math.max(...ends))} units`,
      "longest wait": `${shown(Math.max(...waits))} units`,
    };
    at("totals").innerHTML = Object.entries(totals).map(([name, value]) => `<div><dt>${name}</dt><dd>${value}</dd></div>`).join("");
    const here = rows.map((row) => row.hops[chosen.hop]);
    const working = here.filter((hop) => hop.pairs).length, waiting = here.filter((hop) => hop.wait > 0).length;
    if (isTraded && (chosen.hop === 0 || chosen.hop === rows[0].hops.length - 1)) {
      at("said").textContent = chosen.hop === 0
        ? `Before hop 0: every rank sends the other ranks of its group the queries, keys and values of their heads, and keeps ${heads} of ${data.heads} heads.`
        : "After the last hop: every rank sends the results of its heads back to the ranks that hold the queries.";
      return;
    }
    at("said").textContent = `Hop ${chosen.hop - (isTraded ? 1 : 0)} of ${lastHop}: ${working} of ${rows.length} ranks compute ` +
      `${shown(once(here.map((hop) => hop.pairs)))} pairs${isTraded ? `, each rank in ${heads} of ${data.heads} heads` : ""}; ${waiting ? `${waiting} waited for ${isTraded && chosen.hop === 1 ? "the trade" : waiting > 1 ? "their blocks" : "its block"}` : "nobody waited"}.`;
  }

  function draw() {
    const found = setting(), last = found.names.length - 1;
    chosen.hop = Math.max(0, Math.min(last, chosen.hop));
    at("hop").max = last;
    at("hop").value = chosen.hop;
    const name = found.names[chosen.hop];
    at("hop-shown").textContent = name.startsWith("hop") ? `${name.slice(4)} of ${found.lastHop}` : name;
    at("hop").setAttribute("aria-valuetext", at("hop-shown").textContent);
    for (const select of document.querySelectorAll("#explorer select")) {
      select.value = chosen[select.name];
      if (select.name === "route") {
        for (const option of select.options) {
          option.disabled = !([chosen.mask, chosen.layout, option.value, chosen.ranks].join("|") in data.settings);
        }
      }
    }
    drawPairs(found);
    drawRanks(found);
    drawTimes(found);
    writeNumbers(found);
    history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
  }

  function read() {
    const asked = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(labels)) {
      if (data.choices[name].some(([value]) => value === asked.get(name))) chosen[name] = asked.get(name);
    }
    chosen.hop = Number.parseInt(asked.get("hop") ?? chosen.hop, 10) || 0;
    if (!possible()) chosen.route = "ring";
    draw();
  }

  function step(by) {
    chosen.hop += by;
    draw();
  }

  function play() {
    const isPlaying = timer !== null;
    clearInterval(timer);
    timer = isPlaying ? null : setInterval(() => {
      chosen.hop = chosen.hop >= Number(at("hop").max) ? 0 : chosen.hop + 1;
      draw();
    }, 1200);
    at("play").textContent = isPlaying ? "Play" : "Pause";
    at("play").setAttribute("aria-pressed", String(!isPlaying));
  }

  const form = document.querySelector("#explorer .choices");
  form.innerHTML = Object.entries(labels).map(([name, label]) =>
    `<label>${label}<select name="${name}">${data.choices[name].map(([value, text]) =>
      `<option value="${value}">${text}</option>`).join("")}</select></label>`).join("");
  form.addEventListener("change", (event) => {
    chosen[event.target.name] = event.target.value;
    if (!possible()) chosen.route = "ring";
    draw();
  });
  at("hop").addEventListener("input", (event) => {
    chosen.hop = Number(event.target.value);
    draw();
  });
  at("back").addEventListener("click", () => step(-1));
  at("on").addEventListener("click", () => step(1));
  at("play").addEventListener("click", play);
  addEventListener("hashchange", read);
  read();
})();
