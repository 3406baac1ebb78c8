// Charts on canvases: the graph of jobs, attempts by node, curves over time. They know no server.
'use strict';

const Charts = (() => {
  const FONT = '12px system-ui, sans-serif';

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
  }

  // A canvas of a size in CSS pixels, sharp on any screen.
  function prepare(canvas, width, height) {
    const scale = Math.min(window.devicePixelRatio || 1, 2, 16000 / width, 16000 / height);
    canvas.width = Math.max(1, Math.floor(width * scale));
    canvas.height = Math.max(1, Math.floor(height * scale));
    canvas.style.width = width + 'px';
    canvas.style.height = height + 'px';
    const context = canvas.getContext('2d');
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = 'middle';
    return context;
  }

  function palette(names) {
    return Object.fromEntries(names.map((name) => [name, colour(name)]));
  }

  function shorten(context, text, width) {
    if (context.measureText(text).width <= width) return text;
    let end = text.length;
    while (end > 1 && context.measureText(text.slice(0, end) + '…').width > width) end -= 1;
    return text.slice(0, end) + '…';
  }

  // Places of jobs: a column for each level, wrapped where a level has many. Few jobs are boxes with
  // names, many are dots.
  function layoutGraph(graph, width) {
    const levels = [];
    graph.jobs.forEach((job, at) => (levels[job.level] ??= []).push(at));
    const used = levels.filter((level) => level);
    const hasNames = graph.jobs.length <= 300;
    const [w, h, gap] = hasNames ? [130, 24, 8] : [9, 9, 2];
    const rowsMax = hasNames ? 24 : 60;
    const between = hasNames ? 50 : 24;
    const places = new Array(graph.jobs.length);
    let x = 12, bottom = 0;
    for (const level of used) {
      const columns = Math.ceil(level.length / rowsMax);
      const rows = Math.ceil(level.length / columns);
      level.forEach((at, position) => {
        const column = Math.floor(position / rows), row = position % rows;
        places[at] = { x: x + column * (w + gap), y: 12 + row * (h + gap), w, h };
      });
      bottom = Math.max(bottom, 12 + rows * (h + gap));
      x += columns * (w + gap) - gap + between;
    }
    return { places, hasNames, width: Math.max(x - between + 12, width), height: bottom + 12 };
  }

  function drawGraph(canvas, graph, width) {
    const layout = layoutGraph(graph, width);
    const context = prepare(canvas, layout.width, layout.height);
    const colours = palette(['waiting', 'ready', 'held_back', 'active', 'done', 'failed', 'skipped',
      'line', 'ink', 'surface', 'soft']);
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.beginPath();
    for (const [from, to] of graph.edges) {
      const a = layout.places[from], b = layout.places[to];
      const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2];
      const middle = (x1 + x2) / 2;
      context.moveTo(x1, y1);
      context.bezierCurveTo(middle, y1, middle, y2, x2, y2);
    }
    context.stroke();
    graph.jobs.forEach((job, at) => {
      const place = layout.places[at];
      context.fillStyle = colours[job.state];
      if (!layout.hasNames) {
        context.fillRect(place.x, place.y, place.w, place.h);
        return;
      }
      context.fillRect(place.x, place.y, 8, place.h);
      context.fillStyle = colours.surface;
      context.fillRect(place.x + 8, place.y, place.w - 8, place.h);
      context.strokeStyle = colours[job.state];
      context.strokeRect(place.x + .5, place.y + .5, place.w - 1, place.h - 1);
      context.fillStyle = colours.ink;
      context.fillText(shorten(context, job.name, place.w - 20), place.x + 14, place.y + place.h / 2);
    });
    return (x, y) => {
      const at = layout.places.findIndex((p) => x >= p.x && x <= p.x + p.w && y >= p.y && y <= p.y + p.h);
      return at < 0 ? null : graph.jobs[at];
    };
  }

  function formatTime(ms) {
    const s = ms / 1000;
    if (s < 10) return s.toFixed(1) + ' s';
    if (s < 120) return Math.round(s) + ' s';
    if (s < 7200) return Math.round(s / 60) + ' min';
    if (s < 172800) return (s / 3600).toFixed(1) + ' h';
    return (s / 86400).toFixed(1) + ' d';
  }

  function steps(max, count) {
    const raw = Math.max(max, 1e-9) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
    const values = [];
    for (let value = 0; value <= max * 1.0001; value += step) values.push(value);
    return values;
  }

  function drawGantt(canvas, gantt, width) {
    const left = 96, rowHeight = gantt.rows.length > 60 ? 8 : 18;
    const height = 24 + gantt.rows.length * rowHeight + 8;
    const context = prepare(canvas, width, height);
    const colours = palette(['running', 'done', 'rolled_back', 'failed', 'abandoned', 'line', 'ink', 'soft']);
    const end = Math.max(gantt.wall_ms, 1);
    const scale = (width - left - 12) / end;
    context.fillStyle = colours.soft;
    context.strokeStyle = colours.line;
    context.textAlign = 'center';
    for (const ms of steps(end, Math.max(2, Math.floor(width / 160)))) {
      const x = left + ms * scale;
      context.fillText(formatTime(ms), Math.min(x, width - 24), 10);
      context.beginPath();
      context.moveTo(x, 20);
      context.lineTo(x, height);
      context.stroke();
    }
    context.textAlign = 'right';
    let last = '';
    gantt.rows.forEach((row, at) => {
      const node = row.replace(/ \d+$/, '');
      if (node !== last) {
        context.fillText(shorten(context, node, left - 14), left - 8, 24 + (at + .5) * rowHeight);
      }
      last = node;
    });
    context.textAlign = 'left';
    for (const bar of gantt.bars) {
      const x = left + bar.started_ms * scale, y = 24 + bar.row * rowHeight + 1;
      const length = Math.max((bar.ended_ms - bar.started_ms) * scale, 1);
      context.fillStyle = colours[bar.outcome];
      context.fillRect(x, y, length, rowHeight - 2);
    }
    return (x, y) => {
      const row = Math.floor((y - 24) / rowHeight), ms = (x - left) / scale, slack = 2 / scale;
      return gantt.bars.findLast((bar) => bar.row === row && ms >= bar.started_ms - slack
        && ms <= bar.ended_ms + slack) ?? null;
    };
  }

  const CURVE_COLOURS = ['active', 'done', 'held_back', 'soft'];

  function drawCurves(canvas, times, curves, width, format) {
    const [left, bottom, height] = [72, 20, 180];
    const context = prepare(canvas, width, height);
    const colours = palette([...CURVE_COLOURS, 'line', 'soft']);
    const end = Math.max(times[times.length - 1], 1);
    const top = Math.max(1, ...curves.map((curve) => Math.max(...curve.values)));
    const x = (ms) => left + ms / end * (width - left - 8);
    const y = (value) => height - bottom - value / top * (height - bottom - 12);
    context.fillStyle = colours.soft;
    context.strokeStyle = colours.line;
    context.textAlign = 'right';
    for (const value of steps(top, 4)) {
      context.fillText(format(value), left - 6, y(value));
      context.beginPath();
      context.moveTo(left, y(value));
      context.lineTo(width - 8, y(value));
      context.stroke();
    }
    context.textAlign = 'center';
    for (const ms of steps(end, 4)) context.fillText(formatTime(ms), Math.min(x(ms), width - 24), height - 8);
    curves.forEach((curve, at) => {
      context.strokeStyle = colours[CURVE_COLOURS[at % CURVE_COLOURS.length]];
      context.lineWidth = 2;
      context.setLineDash(at > 2 ? [4, 4] : []);
      context.beginPath();
      curve.values.forEach((value, point) => {
        if (point === 0) context.moveTo(x(times[0]), y(value));
        else {
          context.lineTo(x(times[point]), y(curve.values[point - 1]));
          context.lineTo(x(times[point]), y(value));
        }
      });
      context.stroke();
    });
    context.setLineDash([]);
  }

  return { drawGraph, drawGantt, drawCurves, formatTime, CURVE_COLOURS };
})();
