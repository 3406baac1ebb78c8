//! The progress display: jobs, bytes and time left, on a terminal only.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::Duration;

use bafs_sched::Progress;
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressStyle};
use tokio::task::JoinHandle;

use crate::client::ClusterClient;
use crate::output::Printer;
use crate::traffic::{TrafficTotals, poll_servers};

const POLL_INTERVAL_MS: u64 = 1_000;

/// Shows how far a run is. Gone when dropped.
#[derive(Debug)]
pub(crate) struct ProgressDisplay {
    bar: ProgressBar,
    initial_progress: OnceLock<InitialProgress>,
    traffic_task: Option<JoinHandle<()>>,
}

/// How far the run was when this display looked first: it may have gone on from a journal.
#[derive(Debug, Clone, Copy)]
struct InitialProgress {
    jobs_done: u64,
    elapsed: Duration,
}

impl ProgressDisplay {
    /// Starts to show, if standard error is a terminal and people are reading.
    pub(crate) fn start(output: Printer, client: ClusterClient) -> Self {
        let first = OnceLock::new();
        if output.is_json() || !std::io::stderr().is_terminal() {
            return Self {
                bar: ProgressBar::hidden(),
                initial_progress: first,
                traffic_task: None,
            };
        }
        let bar = ProgressBar::new(0);
        let style = "{elapsed_precise} [{bar:30}] {pos}/{len} jobs, {msg}, {prefix}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        bar.set_message("starting");
        bar.set_prefix(TIME_LEFT_UNKNOWN);
        let showing = bar.clone();
        let bytes = tokio::spawn(async move {
            let mut moved = TrafficTotals::default();
            loop {
                poll_servers(&client, &mut moved).await;
                let (link, nodes) = moved.total_bytes();
                let (link, nodes) = (HumanBytes(link), HumanBytes(nodes));
                showing.set_message(format!("{link} over the home link, {nodes} between nodes"));
                tokio::time::sleep(Duration::from_millis(POLL_INTERVAL_MS)).await;
            }
        });
        Self {
            bar,
            initial_progress: first,
            traffic_task: Some(bytes),
        }
    }

    /// Shows these numbers.
    pub(crate) fn show_progress(&self, progress: &Progress) {
        let elapsed = self.bar.elapsed();
        let first = self.initial_progress.get_or_init(|| InitialProgress {
            jobs_done: progress.jobs_done,
            elapsed,
        });
        self.bar.set_length(progress.jobs_total);
        self.bar.set_position(progress.jobs_done);
        self.bar.set_prefix(time_left(progress, first, elapsed));
    }
}

/// Until a job is done nothing is known about how long one takes.
const TIME_LEFT_UNKNOWN: &str = "time left unknown";

/// The time that the jobs still to do take if they go on as those that were done since the first
/// look.
fn time_left(progress: &Progress, first: &InitialProgress, elapsed: Duration) -> String {
    let to_do = progress.jobs_total.saturating_sub(progress.jobs_done);
    match progress.jobs_done.saturating_sub(first.jobs_done) {
        0 => TIME_LEFT_UNKNOWN.to_owned(),
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

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        if let Some(bytes) = &self.traffic_task {
            bytes.abort();
        }
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_ignores_jobs_done_before_this_start() {
        let progress = |jobs_done| Progress {
            jobs_total: 100,
            jobs_done,
            ..Progress::default()
        };
        let first = InitialProgress {
            jobs_done: 90,
            elapsed: Duration::from_secs(3),
        };
        let left = |done, s| time_left(&progress(done), &first, Duration::from_secs(s));
        assert_eq!(left(90, 60), TIME_LEFT_UNKNOWN);
        // A job whose data are lost is not done any more.
        assert_eq!(left(89, 60), TIME_LEFT_UNKNOWN);
        assert_eq!(left(92, 23), "about 80 seconds left");
    }
}
