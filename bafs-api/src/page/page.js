// The page of BAFS: shows a run as the API tells it, and sends commands. All text of others enters
// the document as text, never as markup.
'use strict';

(() => {
  const API = '/api/v1';
  const TOKEN_KEY = 'bafs-token';
  const VIEWS = ['overview', 'jobs', 'graph', 'timeline', 'cluster', 'events'];
  const STATES = ['done', 'active', 'failed', 'skipped', 'held_back', 'ready', 'waiting'];
  const STATE_WORDS = {
    done: 'done', active: 'running', failed: 'failed', skipped: 'skipped',
    held_back: 'retried later', ready: 'ready', waiting: 'waiting',
  };
  const RUN_WORDS = {
    running: 'running', held: 'held: no job starts', complete: 'complete', failed: 'failed',
    cancelled: 'cancelled', interrupted: 'interrupted: no scheduler runs it',
  };
  const OUTCOME_WORDS = {
    running: 'running', done: 'done', rolled_back: 'its output was lost', failed: 'failed',
    abandoned: 'abandoned',
  };
  const ROWS = 100;
  const EVENTS_MAX = 500;

  const $ = (id) => document.getElementById(id);
  const state = {
    run: null, summary: null, view: 'overview', jobOffset: 0, volumeOffset: 0, job: null,
    firstEvent: 0, isOver: false, stream: null, renderedRevision: -1,
  };

  // --- The API

  function token() {
    const match = /^#token=([0-9a-f]{64})$/.exec(location.hash);
    if (match) {
      localStorage.setItem(TOKEN_KEY, match[1]);
      history.replaceState(null, '', location.pathname);
    }
    return localStorage.getItem(TOKEN_KEY) ?? '';
  }
  const pageToken = token();

  class ApiFailure extends Error {
    constructor(status, error) {
      super(error.message);
      this.status = status;
      this.advice = error.advice;
    }
  }

  async function call(path, options = {}) {
    const headers = { 'x-bafs-token': pageToken };
    if (options.body !== undefined) headers['content-type'] = 'application/json';
    const reply = await fetch(API + path, { ...options, headers, credentials: 'same-origin' });
    const value = await reply.json();
    if (!reply.ok) throw new ApiFailure(reply.status, value.error);
    return value;
  }

  const runPath = (rest = '') => `/runs/${encodeURIComponent(state.run)}${rest}`;
  const jobPath = (job, rest = '') => runPath(`/jobs/${encodeURIComponent(job)}${rest}`);
  const parameters = (values) => '?' + new URLSearchParams(values).toString();

  // --- Words

  function formatBytes(bytes) {
    const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
    let value = bytes, at = 0;
    while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
    return (at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)) + ' ' + units[at];
  }
  const formatTime = Charts.formatTime;
  const formatCount = (count, noun) => `${count.toLocaleString('en')} ${noun}${count === 1 ? '' : 's'}`;

  // --- Elements

  function element(name, properties = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key === 'data') Object.assign(made.dataset, value);
      else if (key in made) made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }
  const mark = (name, text) => element('span', { className: 'mark', data: { state: name } }, text);
  function jobLink(name) {
    const button = element('button', { type: 'button', className: 'link' }, name);
    button.addEventListener('click', () => openJob(name));
    return button;
  }

  function tell(text, isLasting = false) {
    $('notice').textContent = text;
    $('notice').hidden = !text;
    clearTimeout(tell.timer);
    if (text && !isLasting) tell.timer = setTimeout(() => tell(''), 8000);
  }

  function tellFailure(error) {
    if (error instanceof ApiFailure) {
      tell(`${error.message}. ${error.advice}`, error.status === 401 || error.status === 403);
    } else if (!state.isOver) {
      tell('The program that serves this page does not answer. What you see is its last state; '
        + 'bafs page shows the run again.', true);
    }
  }

  // --- Overview

  function drawSummary() {
    const { summary } = state, progress = summary.progress;
    document.title = `${summary.workflow}: ${RUN_WORDS[summary.state]}`;
    $('workflow').textContent = summary.workflow;
    $('state').textContent = RUN_WORDS[summary.state];
    $('state').dataset.state = summary.state;
    $('hold').hidden = !summary.can_steer;
    $('hold').textContent = summary.state === 'held' ? 'Release' : 'Hold';
    $('cancel').hidden = !summary.can_cancel;
    const parts = [`${progress.jobs_done.toLocaleString('en')} of ${formatCount(progress.jobs_total, 'job')} done`];
    if (progress.jobs_running) parts.push(`${progress.jobs_running} running`);
    if (progress.jobs_failed) parts.push(`${progress.jobs_failed} failed`);
    if (progress.jobs_skipped) parts.push(`${progress.jobs_skipped} skipped`);
    if (progress.results_total) parts.push(`${progress.results_done} of ${formatCount(progress.results_total, 'result')} at home`);
    parts.push(formatTime(summary.wall_ms));
    $('counts').textContent = parts.join(' · ');
  }

  function drawBar(states, total) {
    $('bar').replaceChildren(...STATES.filter((name) => states[name]).map((name) => {
      const part = element('span', { data: { state: name, share: '' }, title: `${states[name]} ${STATE_WORDS[name]}` });
      part.style.flexGrow = states[name] / Math.max(total, 1);
      return part;
    }));
    const words = STATES.filter((name) => states[name]).map((name) => `${states[name]} ${STATE_WORDS[name]}`);
    $('bar').setAttribute('aria-label', `Jobs by state: ${words.join(', ')}`);
  }

  function card(value, text) {
    return element('div', { className: 'card' }, element('b', {}, value), element('span', {}, text));
  }

  async function drawOverview() {
    const [run, waiting, failures] = await Promise.all([
      call(runPath()), call(runPath('/waiting')), call(runPath('/failures')),
    ]);
    const progress = run.run.progress, time = run.time;
    drawBar(run.states, progress.jobs_total);
    const spent = Object.values(time).reduce((sum, ms) => sum + ms, 0) || 1;
    const percent = (ms) => Math.round(100 * ms / spent) + ' %';
    $('cards').replaceChildren(
      card(progress.nodes.toLocaleString('en'), progress.nodes_lost ? `nodes, ${progress.nodes_lost} lost` : 'nodes'),
      card(progress.volumes.toLocaleString('en'), 'volumes'),
      card(progress.attempts.toLocaleString('en'), 'attempts'),
      card(formatBytes(progress.result_bytes), 'of results at home'),
      card(percent(time.computing_ms), 'of the time computing'),
      card(percent(time.io_wait_ms + time.copying_ms), 'waiting for data and copying'),
      card(percent(time.queued_ms), 'queued'),
      card(percent(time.lost_ms), 'lost'),
    );
    const names = (jobs, count) => element('div', { className: 'names' },
      ...jobs.map(jobLink), count > jobs.length ? element('span', {}, `and ${count - jobs.length} more`) : null);
    $('waiting').replaceChildren(...waiting.groups.map((group) => element('div', { className: 'group' },
      element('p', {}, `${formatCount(group.count, 'job')}: ${group.reason}`), names(group.jobs, group.count))));
    if (waiting.unexplained) $('waiting').append(element('p', { className: 'hint' }, `and ${formatCount(waiting.unexplained, 'more job')} ready to start`));
    if (!waiting.groups.length) $('waiting').append(element('p', { className: 'hint' }, 'No job waits.'));
    $('failures').replaceChildren(...failures.groups.map((group) => element('div', { className: 'group' },
      element('p', {}, mark('failed', `${formatCount(group.count, 'job')}: ${group.reason}${group.node ? ` (on ${group.node})` : ''}`)),
      element('p', { className: 'advice' }, group.advice),
      group.output_tail ? element('pre', { className: 'log' }, group.output_tail.split('\n').slice(-20).join('\n')) : null,
      names(group.jobs, group.count))));
    if (!failures.groups.length) $('failures').append(element('p', { className: 'hint' }, 'No job failed.'));
    $('levels').replaceChildren(...run.levels.slice(0, 60).map((level) => {
      const bar = element('div', { className: 'bar' });
      for (const [name, count] of [['done', level.done], ['active', level.active], ['failed', level.failed],
        ['waiting', level.total - level.done - level.active - level.failed]]) {
        const part = element('span', { data: { state: name } });
        part.style.flexGrow = count / level.total;
        bar.append(part);
      }
      return element('div', { className: 'level' }, element('span', {}, `Level ${level.level}`), bar,
        element('span', { className: 'n' }, `${level.done} of ${level.total}`));
    }));
    $('warnings-section').hidden = !run.warnings.length;
    $('warnings').replaceChildren(...run.warnings.slice(-50).map((text) => element('li', {}, text)));
  }

  // --- Lists

  function pager(place, total, offset, shown, move) {
    const until = offset + shown;
    const button = (text, isOff, to) => {
      const made = element('button', { type: 'button', disabled: isOff }, text);
      made.addEventListener('click', () => move(to));
      return made;
    };
    $(place).replaceChildren(button('Previous', offset === 0, Math.max(0, offset - ROWS)),
      element('span', {}, total ? `${offset + 1} to ${until} of ${total.toLocaleString('en')}` : 'none'),
      button('Next', until >= total, offset + ROWS));
  }

  const cell = (content, className = '') => element('td', { className }, content);
  const fill = (table, rows) => $(table).tBodies[0].replaceChildren(...rows);

  function jobTime(job) {
    if (job.started_ms === null) return '';
    return formatTime((job.ended_ms ?? state.summary.wall_ms) - job.started_ms);
  }

  async function drawJobs() {
    const query = { offset: state.jobOffset, limit: ROWS };
    if ($('search').value) query.search = $('search').value;
    if ($('state-filter').value) query.state = $('state-filter').value;
    const page = await call(runPath('/jobs') + parameters(query));
    fill('job-table', page.jobs.map((job) => element('tr', {},
      cell(jobLink(job.name)), cell(mark(job.state, STATE_WORDS[job.state] + (job.is_held && !isFinal(job.state) ? ', held' : ''))),
      cell(job.node ?? ''), cell(String(job.attempts), 'n'), cell(jobTime(job), 'n'), cell(String(job.priority), 'n'))));
    pager('job-pager', page.total, state.jobOffset, page.jobs.length, (to) => { state.jobOffset = to; refresh(); });
  }
  const isFinal = (name) => ['done', 'failed', 'skipped'].includes(name);

  async function drawCluster() {
    const [nodes, volumes] = await Promise.all([
      call(runPath('/nodes') + parameters({ limit: 1000 })),
      call(runPath('/volumes') + parameters({ offset: state.volumeOffset, limit: ROWS })),
    ]);
    fill('node-table', nodes.rows.map((node) => {
      const meter = element('progress', { max: Math.max(node.capacity_bytes, 1), value: node.reserved_bytes });
      meter.setAttribute('aria-label', `space of ${node.name}`);
      const text = `${formatBytes(node.reserved_bytes)} of ${formatBytes(node.capacity_bytes)}`;
      return element('tr', {}, cell(node.name), cell(`${node.jobs} of ${node.slots}`, 'n'),
        element('td', {}, meter, element('div', { className: 'hint' }, text)),
        cell(node.is_lost ? mark('failed', 'lost') : node.description ?? 'present'));
    }));
    const kinds = { scratch: 'scratch', cache: 'cache', copy: 'copy' };
    fill('volume-table', volumes.rows.map((volume) => element('tr', {}, cell(volume.name), cell(kinds[volume.role]),
      cell(volume.node), cell(formatBytes(volume.bytes), 'n'), cell(volumeState(volume)))));
    pager('volume-pager', volumes.total, state.volumeOffset, volumes.rows.length, (to) => { state.volumeOffset = to; refresh(); });
  }

  function volumeState(volume) {
    if (volume.is_lost) return mark('failed', 'lost');
    if (volume.deleted_ms !== null) return mark('skipped', 'deleted');
    return volume.created_ms === null ? mark('waiting', 'being created') : mark('done', 'present');
  }

  // --- Charts

  const hits = {};
  const roomOf = (canvas) => Math.max(280, canvas.parentElement.clientWidth - 2);

  function legend(place, words) {
    $(place).replaceChildren(...Object.entries(words).map(([name, text]) => mark(name, text)));
  }

  async function drawGraph() {
    const graph = await call(runPath('/graph'));
    legend('graph-legend', STATE_WORDS);
    hits.graph = Charts.drawGraph($('graph-canvas'), graph, roomOf($('graph-canvas')));
    $('graph-hint').textContent = (graph.omitted_edges ? `${graph.omitted_edges} lines are left out. ` : '')
      + 'Select a job to see more; the view Jobs lists the same jobs.';
  }

  async function drawTimeline() {
    const [gantt, series] = await Promise.all([call(runPath('/gantt')), call(runPath('/series'))]);
    legend('gantt-legend', OUTCOME_WORDS);
    hits.gantt = Charts.drawGantt($('gantt-canvas'), gantt, roomOf($('gantt-canvas')));
    $('gantt-hint').textContent = gantt.omitted ? `${gantt.omitted} earlier attempts are left out.` : '';
    drawSeries(series);
  }

  const CHARTS = {
    slots: 'Slots', space: 'Space reserved', home: 'Home, by the journal: bytes so far',
    link: 'Links, by counters of servers: bytes so far',
  };
  const CURVES = {
    slots_used: 'used by jobs', slots_present: 'present', scratch: 'scratch volumes', cache: 'cache volumes',
    copies: 'copies', offered: 'offered by nodes', sent_home: 'results sent home',
    filled_from_home: 'volumes filled', read_by_jobs: 'read by jobs', home_link: 'link to home',
    between_nodes: 'between nodes',
  };

  function drawSeries(series) {
    const shown = Object.entries(CHARTS).map(([chart, title]) => [chart, title, series.curves.filter((curve) =>
      curve.chart === chart && (curve.values.some((value) => value) || chart === 'slots'))]);
    // All figures are there before one is measured: they share the width.
    for (const [chart, title, curves] of shown) {
      if (!curves.length) $('chart-' + chart)?.remove();
      else if (!$('chart-' + chart)) {
        $('series').append(element('figure', { id: 'chart-' + chart }, element('figcaption', {}, title),
          element('p', { className: 'legend' }), element('canvas', { role: 'img' })));
      }
    }
    for (const [chart, title, curves] of shown.filter(([, , curves]) => curves.length)) {
      const figure = $('chart-' + chart);
      figure.querySelector('.legend').replaceChildren(...curves.map((curve, at) => {
        const text = mark('', CURVES[curve.name] ?? curve.name);
        text.style.setProperty('--colour', `var(--${Charts.CURVE_COLOURS[at % 4]})`);
        return text;
      }));
      const canvas = figure.querySelector('canvas');
      const last = curves.map((curve) => `${CURVES[curve.name]} ${curve.values.at(-1)}`);
      canvas.setAttribute('aria-label', `${title} over time; now ${last.join(', ')} ${curves[0].unit}`);
      const format = curves[0].unit === 'bytes' ? formatBytes : (value) => String(Math.round(value * 10) / 10);
      Charts.drawCurves(canvas, series.times_ms, curves, figure.clientWidth - 28, format);
    }
  }

  // --- Events

  function eventItem(line) {
    return element('li', {}, element('time', {}, formatTime(line.at_ms)), element('span', {}, line.text));
  }

  function addEvent(line) {
    $('event-list').prepend(eventItem(line));
    if ($('event-list').childElementCount > EVENTS_MAX) $('event-list').lastElementChild.remove();
  }

  async function loadEarlierEvents() {
    const from = Math.max(0, state.firstEvent - ROWS);
    const page = await call(runPath('/history') + parameters({ offset: from, limit: Math.max(1, state.firstEvent - from) }));
    const lines = state.firstEvent === 0 ? [] : page.lines.filter((line) => line.number < state.firstEvent);
    $('event-list').append(...lines.reverse().map(eventItem));
    state.firstEvent = from;
    $('more-events').hidden = from === 0;
  }

  // Reads server-sent events by fetch, which can send the token.
  async function readStream(from) {
    const reply = await fetch(`${API}${runPath('/events')}?from=${from}`, {
      headers: { 'x-bafs-token': pageToken }, credentials: 'same-origin', signal: state.stream.signal,
    });
    if (!reply.ok) throw new ApiFailure(reply.status, (await reply.json()).error);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = '', next = from;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return next;
      text += value;
      let end;
      while ((end = text.indexOf('\n\n')) >= 0) {
        const fields = text.slice(0, end).split('\n');
        text = text.slice(end + 2);
        const field = (name) => fields.find((line) => line.startsWith(name + ': '))?.slice(name.length + 2);
        if (field('data') === undefined) continue;
        const data = JSON.parse(field('data'));
        if (field('event') === 'line') { next = data.number + 1; addEvent(data); } else takeSummary(data, field('event') === 'end');
      }
    }
  }

  function takeSummary(summary, isEnd) {
    state.summary = summary;
    state.isOver = isEnd || !summary.can_steer;
    drawSummary();
    // The program that serves the page ends with its run.
    if (isEnd) refresh(); else requestRefresh();
  }

  async function follow(from) {
    let next = from, pause = 500;
    while (!state.stream.signal.aborted) {
      try {
        next = await readStream(next);
        if (state.isOver) return;
        pause = 500;
      } catch (error) {
        if (state.stream.signal.aborted || state.isOver) return;
        tellFailure(error);
        if (error instanceof ApiFailure && error.status < 500) return;
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(pause * 2, 10000);
    }
  }

  // --- What is drawn when

  const DRAW = { overview: drawOverview, jobs: drawJobs, graph: drawGraph, timeline: drawTimeline, cluster: drawCluster, events: null };
  let timer = null, isDrawing = false, isWanted = false;

  // At most one drawing at a time, and a pause after it that grows with what it costs.
  async function refresh() {
    clearTimeout(timer);
    timer = null;
    if (isDrawing) { isWanted = true; return; }
    isDrawing = true;
    isWanted = false;
    const began = performance.now();
    try {
      if (state.view !== 'overview') drawBar((await call(runPath())).states, state.summary.progress.jobs_total);
      await DRAW[state.view]?.();
      document.body.dataset.drawn = state.view;
    } catch (error) {
      tellFailure(error);
    }
    isDrawing = false;
    refresh.cost = performance.now() - began;
    if (isWanted) requestRefresh();
  }
  refresh.cost = 0;

  function requestRefresh() {
    if (document.hidden) { isWanted = true; return; }
    timer ??= setTimeout(refresh, Math.max(700, 3 * refresh.cost));
  }

  function showView(name, isFocused = false) {
    state.view = name;
    for (const view of VIEWS) {
      const tab = $('tab-' + view), isShown = view === name;
      $(view).hidden = !isShown;
      tab.setAttribute('aria-selected', String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      if (isShown && isFocused) tab.focus();
    }
    history.replaceState(null, '', '#' + name);
    delete document.body.dataset.drawn;
    refresh();
  }

  // --- A job

  async function openJob(name) {
    state.job = { name, attempt: null };
    $('job-name').textContent = name;
    for (const place of ['job-reason', 'log-stdout', 'log-stderr', 'log-missing', 'log-live']) $(place).textContent = '';
    $('job-facts').replaceChildren();
    $('log-attempt').replaceChildren();
    if (!$('job-dialog').open) $('job-dialog').showModal();
    await drawJob();
  }

  async function drawJob() {
    const { name } = state.job;
    let job;
    try {
      job = await call(jobPath(name));
    } catch (error) {
      $('job-reason').textContent = error.message;
      return;
    }
    if (state.job?.name !== name) return;
    $('job-state').textContent = STATE_WORDS[job.state];
    $('job-state').dataset.state = job.state;
    const failure = job.failure ? `${job.failure.reason}. ${job.failure.advice}` : null;
    $('job-reason').textContent = failure ?? (job.reason ? `Why it does not run: ${job.reason}.` : '');
    $('job-actions').hidden = !state.summary.can_steer || isFinal(job.state);
    state.job.priority = job.priority;
    state.job.isHeld = job.is_held;
    $('job-hold').textContent = job.is_held ? 'Release' : 'Hold';
    const facts = [
      ['Command', job.details.command.join(' ')],
      ['Pipeline', `of ${job.pipeline}, priority ${job.priority}`],
      ['Processors', String(job.details.cpus)],
      ['Memory', job.details.memory_bytes ? formatBytes(job.details.memory_bytes) : 'no limit'],
      ['Volumes', job.details.mounts.map(([path, volume]) => `${volume} at ${path}`).join(', ') || 'none'],
    ];
    $('job-facts').replaceChildren(...facts.flatMap(([term, text]) => [element('dt', {}, term), element('dd', {}, text)]),
      ...[['After', job.parents], ['Before', job.children]].filter(([, jobs]) => jobs.length).flatMap(([term, jobs]) => [
        element('dt', {}, term), element('dd', { className: 'names' }, ...jobs.slice(0, 20).map(jobLink),
          jobs.length > 20 ? `and ${jobs.length - 20} more` : null)]));
    fill('attempt-table', job.executions.map((attempt, at) => element('tr', {}, cell(String(at + 1), 'n'), cell(attempt.node),
      cell(mark(attempt.outcome, attempt.end && attempt.end !== 'done' ? attempt.end : OUTCOME_WORDS[attempt.outcome])),
      cell(formatTime((attempt.ended_ms ?? state.summary.wall_ms) - attempt.started_ms), 'n'),
      cell(formatBytes(attempt.read_bytes), 'n'), cell(formatBytes(attempt.written_bytes), 'n'))));
    await drawLog();
  }

  function putLog(place, text) {
    const box = $(place), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (box.textContent === text) return;
    box.textContent = text;
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  async function drawLog() {
    const { name, attempt } = state.job;
    let log;
    try {
      log = await call(jobPath(name, '/logs') + (attempt ? parameters({ attempt }) : ''));
    } catch (error) {
      if (state.job?.name === name) $('log-missing').textContent = error.message;
      return;
    }
    if (state.job?.name !== name) return;
    const choice = $('log-attempt');
    if (choice.childElementCount !== log.attempts) {
      choice.replaceChildren(...Array.from({ length: log.attempts }, (_, at) => element('option', { value: String(at + 1) }, String(at + 1))));
    }
    choice.value = String(log.attempt);
    choice.disabled = log.attempts < 2;
    $('log-live').textContent = log.is_running ? `live, on ${log.node}` : log.attempts ? `${log.node}: ${log.end}` : '';
    $('log-missing').textContent = log.missing_reason ? `There is no output: ${log.missing_reason}.` : log.is_cut ? 'Only the end is shown.' : '';
    putLog('log-stdout', log.stdout);
    putLog('log-stderr', log.stderr);
  }

  setInterval(() => {
    if (!$('job-dialog').open || document.hidden || !state.job) return;
    if (state.summary?.can_steer) drawJob();
  }, 1000);

  // --- Commands

  function confirm(text, yes) {
    $('confirm-text').textContent = text;
    $('confirm-yes').textContent = yes;
    $('confirm').returnValue = 'no';
    $('confirm').showModal();
    $('confirm-no').focus();
    return new Promise((resolve) => {
      $('confirm').addEventListener('close', () => resolve($('confirm').returnValue === 'yes'), { once: true });
    });
  }

  async function command(path, body) {
    try {
      const answer = await call(path, { method: 'POST', body: body && JSON.stringify(body) });
      tell(answer.message[0].toUpperCase() + answer.message.slice(1) + '.');
    } catch (error) {
      tellFailure(error);
    }
    requestRefresh();
  }

  $('hold').addEventListener('click', () => command(runPath(state.summary.state === 'held' ? '/release' : '/hold')));
  $('cancel').addEventListener('click', async () => {
    if (await confirm('Cancel the run? Its jobs stop, and its volumes are deleted. Results at home stay.', 'Cancel run')) command(runPath('/cancel'));
  });
  $('job-prefer').addEventListener('click', () => command(jobPath(state.job.name, '/priority'), { priority: state.job.priority + 1 }));
  $('job-hold').addEventListener('click', () => command(jobPath(state.job.name, state.job.isHeld ? '/release' : '/hold')));
  $('job-cancel').addEventListener('click', async () => {
    const { name } = state.job;
    if (await confirm(`Cancel the pipeline of ${name}? Its unfinished jobs do not run.`, 'Cancel pipeline')) command(jobPath(name, '/cancel'));
  });
  $('job-close').addEventListener('click', () => $('job-dialog').close());
  $('job-dialog').addEventListener('close', () => { state.job = null; });
  $('log-attempt').addEventListener('change', () => { state.job.attempt = Number($('log-attempt').value); drawLog(); });

  // --- Controls

  for (const view of VIEWS) $('tab-' + view).addEventListener('click', () => showView(view));
  $('tabs').addEventListener('keydown', (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = VIEWS.indexOf(state.view);
    const to = event.key === 'Home' ? 0 : event.key === 'End' ? VIEWS.length - 1 : move ? (at + move + VIEWS.length) % VIEWS.length : null;
    if (to === null) return;
    event.preventDefault();
    showView(VIEWS[to], true);
  });
  let searching = null;
  $('search').addEventListener('input', () => {
    clearTimeout(searching);
    searching = setTimeout(() => { state.jobOffset = 0; refresh(); }, 200);
  });
  $('state-filter').addEventListener('change', () => { state.jobOffset = 0; refresh(); });
  $('job-filter').addEventListener('submit', (event) => event.preventDefault());
  $('more-events').addEventListener('click', () => loadEarlierEvents().catch(tellFailure));
  for (const [canvas, name, of] of [['graph-canvas', 'graph', 'name'], ['gantt-canvas', 'gantt', 'job']]) {
    $(canvas).addEventListener('click', (event) => {
      const hit = hits[name]?.(event.offsetX, event.offsetY);
      if (hit) openJob(hit[of]);
    });
    $(canvas).addEventListener('mousemove', (event) => {
      const hit = hits[name]?.(event.offsetX, event.offsetY);
      $(canvas).title = hit ? `${hit[of]}: ${STATE_WORDS[hit.state] ?? OUTCOME_WORDS[hit.outcome]}` : '';
      $(canvas).style.cursor = hit ? 'pointer' : 'default';
    });
  }
  document.addEventListener('visibilitychange', () => { if (!document.hidden && isWanted) requestRefresh(); });
  let resizing = null;
  window.addEventListener('resize', () => { clearTimeout(resizing); resizing = setTimeout(refresh, 200); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', refresh);
  $('runs').addEventListener('change', () => start($('runs').value));

  // --- Start

  async function start(run) {
    state.stream?.abort();
    state.stream = new AbortController();
    Object.assign(state, { run, jobOffset: 0, volumeOffset: 0, isOver: false });
    state.summary = (await call(runPath())).run;
    drawSummary();
    const { total } = await call(runPath('/history') + parameters({ limit: 1 }));
    $('event-list').replaceChildren();
    state.firstEvent = total;
    await loadEarlierEvents();
    const asked = location.hash.slice(1);
    showView(VIEWS.includes(asked) ? asked : 'overview');
    follow(total);
  }

  async function begin() {
    for (let tries = 0; ; tries += 1) {
      try {
        const { runs } = await call('/runs');
        if (!runs.length) { tell('There is no run yet.', true); return; }
        $('runs').replaceChildren(...runs.map((run) => element('option', { value: run.id }, `${run.workflow} (${run.id})`)));
        $('run-choice').hidden = runs.length < 2;
        tell('');
        await start(runs[0].id);
        return;
      } catch (error) {
        tellFailure(error);
        // A run that begins has no journal for a moment.
        if (!(error instanceof ApiFailure) || error.status !== 503 || tries > 60) return;
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
  }
  begin();
})();
