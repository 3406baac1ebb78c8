//! The progress display: jobs, bytes and time left, on a terminal only.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::Duration;

use bafs_proto::ids::ServerId;
use bafs_proto::message::{ReadCounters, ServerKind};
use bafs_sched::logic::Progress;
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use tokio::task::JoinHandle;

use crate::client::Client;
use crate::output::Output;

const BYTES_MS: u64 = 1_000;

/// Shows how far a run is. Gone when dropped.
#[derive(Debug)]
pub(crate) struct Display {
    bar: ProgressBar,
    first: OnceLock<First>,
    bytes: Option<JoinHandle<()>>,
}

/// How far the run was when this display looked first: it may have gone on from a journal.
#[derive(Debug, Clone, Copy)]
struct First {
    jobs_done: u64,
    elapsed: Duration,
}

impl Display {
    /// Starts to show, if standard error is a terminal and people are reading.
    pub(crate) fn start(output: Output, client: Client) -> Self {
        let first = OnceLock::new();
        if output.is_json() || !std::io::stderr().is_terminal() {
            return Self {
                bar: ProgressBar::hidden(),
                first,
                bytes: None,
            };
        }
        let bar = ProgressBar::new(0);
        let style = "{elapsed_precise} [{bar:30}] {pos}/{len} jobs, {msg}, {prefix}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        bar.set_message("starting");
        bar.set_prefix(TIME_UNKNOWN);
        let showing = bar.clone();
        let bytes = tokio::spawn(async move {
            let mut moved = Moved::default();
            loop {
                look(&client, &mut moved).await;
                let (link, nodes) = moved.sums();
                let (link, nodes) = (HumanBytes(link), HumanBytes(nodes));
                showing.set_message(format!("{link} over the home link, {nodes} between nodes"));
                tokio::time::sleep(Duration::from_millis(BYTES_MS)).await;
            }
        });
        Self {
            bar,
            first,
            bytes: Some(bytes),
        }
    }

    /// Shows these numbers.
    pub(crate) fn show(&self, progress: &Progress) {
        let elapsed = self.bar.elapsed();
        let first = self.first.get_or_init(|| First {
            jobs_done: progress.jobs_done,
            elapsed,
        });
        self.bar.set_length(progress.jobs_total);
        self.bar.set_position(progress.jobs_done);
        self.bar.set_prefix(time_left(progress, first, elapsed));
    }
}

/// Until a job is done nothing is known about how long one takes.
const TIME_UNKNOWN: &str = "time left not known yet";

/// The time that the jobs still to do take if they go on as those that were done since the first
/// look.
fn time_left(progress: &Progress, first: &First, elapsed: Duration) -> String {
    let to_do = progress.jobs_total.saturating_sub(progress.jobs_done);
    match progress.jobs_done.saturating_sub(first.jobs_done) {
        0 => TIME_UNKNOWN.to_owned(),
        done => {
            let elapsed = elapsed.saturating_sub(first.elapsed);
            let seconds = elapsed.as_secs_f64() * to_do as f64 / done as f64;
            format!(
                "about {} left",
                HumanDuration(Duration::from_secs(seconds.ceil() as u64))
            )
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if let Some(bytes) = &self.bytes {
            bytes.abort();
        }
        self.bar.finish_and_clear();
    }
}

/// Bytes that servers moved since they were looked at first.
#[derive(Debug, Default)]
struct Moved {
    servers: BTreeMap<ServerId, Counted>,
}

#[derive(Debug)]
struct Counted {
    kind: ServerKind,
    /// What its counter said last; it begins anew with each start of the server.
    last: u64,
    since: u64,
}

impl Moved {
    /// Takes what the counter of a server says now. What a server without an answer said stays.
    fn note(&mut self, server: ServerId, kind: ServerKind, value: u64) {
        let new = || Counted {
            kind,
            last: value,
            since: 0,
        };
        let counted = self.servers.entry(server).or_insert_with(new);
        let more = value.checked_sub(counted.last).unwrap_or(value);
        counted.since = counted.since.saturating_add(more);
        counted.last = value;
    }

    /// What crossed the link to home, and what nodes gave each other.
    fn sums(&self) -> (u64, u64) {
        let sum = |kind: ServerKind| {
            let servers = self.servers.values().filter(|server| server.kind == kind);
            servers.map(|server| server.since).sum()
        };
        (sum(ServerKind::Home), sum(ServerKind::Node))
    }
}

/// Asks the servers that live what they moved.
async fn look(client: &Client, moved: &mut Moved) {
    for server in client.servers(None).await.unwrap_or_default() {
        let Ok(counters) = client
            .call_within(&server.address, ReadCounters, BYTES_MS)
            .await
        else {
            continue;
        };
        let value = |name: &str| counters.values.get(name).copied().unwrap_or(0);
        let value = match server.kind {
            ServerKind::Home => value("home_read_bytes") + value("home_written_bytes"),
            ServerKind::Node => value("cache_served_bytes"),
        };
        moved.note(server.id, server.kind, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_before_this_start_says_nothing_of_the_time_left() {
        let progress = |jobs_done| Progress {
            jobs_total: 100,
            jobs_done,
            ..Progress::default()
        };
        let first = First {
            jobs_done: 90,
            elapsed: Duration::from_secs(3),
        };
        let left = |done, s| time_left(&progress(done), &first, Duration::from_secs(s));
        assert_eq!(left(90, 60), TIME_UNKNOWN);
        // A job whose data are lost is not done any more.
        assert_eq!(left(89, 60), TIME_UNKNOWN);
        assert_eq!(left(92, 23), "about 80 seconds left");
    }

    #[test]
    fn only_what_moves_since_the_first_look_is_shown_and_it_is_not_forgotten() {
        let (home, node) = (ServerId::random(), ServerId::random());
        let mut moved = Moved::default();
        moved.note(home, ServerKind::Home, 5_000);
        moved.note(node, ServerKind::Node, 700);
        assert_eq!(moved.sums(), (0, 0));
        moved.note(home, ServerKind::Home, 5_020);
        moved.note(node, ServerKind::Node, 701);
        assert_eq!(moved.sums(), (20, 1));
        // The node does not answer; the home was started anew.
        moved.note(home, ServerKind::Home, 4);
        assert_eq!(moved.sums(), (24, 1));
    }
}
