//! The progress display: jobs, bytes and time left, on a terminal only.

use std::io::IsTerminal;
use std::time::Duration;

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
    bytes: Option<JoinHandle<()>>,
}

impl Display {
    /// Starts to show, if standard error is a terminal and people are reading.
    pub(crate) fn start(output: Output, client: Client) -> Self {
        if output.is_json() || !std::io::stderr().is_terminal() {
            return Self {
                bar: ProgressBar::hidden(),
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
            loop {
                tokio::time::sleep(Duration::from_millis(BYTES_MS)).await;
                let (link, cluster) = bytes_moved(&client).await;
                let (link, cluster) = (HumanBytes(link), HumanBytes(cluster));
                showing.set_message(format!("{link} over the home link, {cluster} from caches"));
            }
        });
        Self {
            bar,
            bytes: Some(bytes),
        }
    }

    /// Shows these numbers.
    pub(crate) fn show(&self, progress: &Progress) {
        self.bar.set_length(progress.jobs_total);
        self.bar.set_position(progress.jobs_done);
        self.bar.set_prefix(time_left(progress, self.bar.elapsed()));
    }
}

/// Until a job is done nothing is known about how long one takes.
const TIME_UNKNOWN: &str = "time left not known yet";

/// The time that the jobs still to do take if they go on as those that are done.
fn time_left(progress: &Progress, elapsed: Duration) -> String {
    let to_do = progress.jobs_total.saturating_sub(progress.jobs_done);
    match progress.jobs_done {
        0 => TIME_UNKNOWN.to_owned(),
        done => {
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

/// Bytes that crossed the link to home, and bytes that caches served, on servers that answer.
async fn bytes_moved(client: &Client) -> (u64, u64) {
    let (mut link, mut cluster) = (0, 0);
    for server in client.servers(None).await.unwrap_or_default() {
        let Ok(counters) = client
            .call_within(&server.address, ReadCounters, BYTES_MS)
            .await
        else {
            continue;
        };
        let value = |name: &str| counters.values.get(name).copied().unwrap_or(0);
        match server.kind {
            ServerKind::Home => link += value("home_read_bytes") + value("home_written_bytes"),
            ServerKind::Node => cluster += value("cache_served_bytes"),
        }
    }
    (link, cluster)
}
