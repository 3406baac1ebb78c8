//! A run as a stream of events (server-sent events): its summary when it changes, and each line of
//! its history. The stream ends with the run.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use bafs_proto::{Error, ErrorCode};
use bafs_queue::Requester;
use futures_util::Stream;
use serde::Deserialize;

use crate::api_error::{ApiError, ApiResult};
use crate::app::App;
use crate::open_streams::OpenStream;
use crate::parameters::{Caller, Parameters};
use crate::views::{HistoryPage, RunSummary};

/// Pause between two looks. A person sees no difference to a shorter one.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Lines that are read at once.
const LINES_MAX: usize = 500;

/// Where a browser begins again after its connection broke.
const LAST_EVENT_HEADER: &str = "last-event-id";

/// From which line on; by default only new ones.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EventQuery {
    from: Option<u64>,
}

/// What a stream still has to send, and how far it is.
struct Cursor {
    app: App,
    requester: Requester,
    /// Of the requester, when the stream began.
    revocations: u64,
    run: String,
    next_line: u64,
    revision: Option<u64>,
    pending: VecDeque<Event>,
    is_over: bool,
    _open: OpenStream,
}

pub(crate) async fn stream_events(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    Parameters(query): Parameters<EventQuery>,
    headers: HeaderMap,
) -> ApiResult<Sse<impl Stream<Item = Result<Event, Infallible>>>> {
    let open = app.streams.open(&requester.user);
    let too_many = || {
        let text = "too many streams of events are open; close other pages, or try again later";
        ApiError::from(Error::new(ErrorCode::Busy, text))
    };
    let open = open.ok_or_else(too_many)?;
    let resumed = headers.get(LAST_EVENT_HEADER);
    let resumed = resumed.and_then(|id| id.to_str().ok()?.parse::<u64>().ok());
    let from = resumed.map(|last| last.saturating_add(1)).or(query.from);
    // An unknown run is an error of the request, not of the stream.
    let (asker, id) = (requester.clone(), run.clone());
    let total = app
        .ask(move |source| Ok(source.read_history(&asker, &id, 0, 0)?.total))
        .await?;
    let cursor = Cursor {
        revocations: app.access.count_revocations(&requester.user),
        app,
        requester,
        run,
        next_line: from.unwrap_or(total),
        revision: None,
        pending: VecDeque::new(),
        is_over: false,
        _open: open,
    };
    let events = futures_util::stream::unfold(cursor, |mut cursor| async move {
        let event = cursor.next_event().await?;
        Some((Ok(event), cursor))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

impl Cursor {
    /// Waits for the next event; nothing when the run is over.
    async fn next_event(&mut self) -> Option<Event> {
        let mut is_first = self.revision.is_none();
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Some(event);
            }
            if self.is_over {
                return None;
            }
            if !std::mem::take(&mut is_first) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            self.look().await;
        }
    }

    /// Takes what is new.
    async fn look(&mut self) {
        if self.app.access.count_revocations(&self.requester.user) != self.revocations {
            self.is_over = true;
            return;
        }
        let (requester, run, from) = (self.requester.clone(), self.run.clone(), self.next_line);
        let read = self.app.ask(move |source| {
            let summary = source.view_run(&requester, &run)?.summary.clone();
            let page = source.read_history(&requester, &run, from, LINES_MAX)?;
            Ok((summary, page))
        });
        // A journal that cannot be read now is read the next time.
        if let Ok((summary, page)) = read.await {
            self.note(&summary, &page);
        }
    }

    fn note(&mut self, summary: &RunSummary, page: &HistoryPage) {
        if self.revision != Some(summary.revision) {
            self.revision = Some(summary.revision);
            self.push(Event::default().event("run"), summary);
        }
        for line in &page.lines {
            let event = Event::default().event("line").id(line.number.to_string());
            self.push(event, line);
            self.next_line = line.number + 1;
        }
        if !summary.state.is_active() && self.next_line >= page.total {
            self.push(Event::default().event("end"), summary);
            self.is_over = true;
        }
    }

    fn push(&mut self, event: Event, data: &impl serde::Serialize) {
        // Views are plain data, which always encode.
        self.pending.extend(event.json_data(data));
    }
}
