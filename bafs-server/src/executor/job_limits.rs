//! Memory and run time of a job: watched from outside, until one exceeds its limit. Ends nothing.
//!
//! The memory of a job is what its processes have for themselves, and what they share by name
//! (`/dev/shm`). Pages of files do not count: the kernel can drop them. A page that several
//! processes share counts once.
//!
//! In a control group, the kernel ends a process in the moment when it exceeds the limit; then the
//! job is over. Without one nobody does, so the processes are looked at several times a second.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bafs_proto::message::{JobLimits, JobOutcome, JobReport};
use bafs_proto::{Error, ErrorCode};

use super::control_groups::{GroupUsage, JobGroup};
use super::job_processes::find_descendants;
use crate::clock;

/// How often the memory is looked at. A process that fills 4 GB a second, as one core can, is
/// 400 MB beyond its limit then.
const POLL: Duration = Duration::from_millis(100);

/// A look is repeated after so many times its duration: it takes as long as the job has pages.
const PAUSE_FACTOR: u64 = 20;

/// The limits of one execution.
#[derive(Debug)]
pub(super) struct JobWatch {
    pub(super) job: String,
    pub(super) limits: JobLimits,
    /// The agent, from which all processes of the job descend; `None` when it has ended.
    pub(super) agent: Option<u32>,
    /// Holds the job to its memory; `None` where the node cannot make one.
    pub(super) group: Option<Arc<JobGroup>>,
    /// The most memory that was seen in its group, in bytes.
    pub(super) seen_bytes_max: AtomicU64,
}

impl JobWatch {
    /// Waits until the job exceeds a limit; for ever if it never does.
    pub(super) async fn wait_for_excess(&self) -> Error {
        tokio::select! {
            error = self.wait_for_memory() => error,
            error = self.wait_for_end_of_time() => error,
        }
    }

    async fn wait_for_end_of_time(&self) -> Error {
        let Some(ms) = self.limits.runtime_ms else {
            return std::future::pending().await;
        };
        tokio::time::sleep(Duration::from_millis(ms)).await;
        let text = format!(
            "job '{}' ran longer than its max_runtime of {} s",
            self.job,
            ms / 1_000
        );
        Error::new(ErrorCode::RuntimeExceeded, text)
    }

    async fn wait_for_memory(&self) -> Error {
        if self.group.is_some() {
            return self.wait_for_full_group().await;
        }
        let (Some(limit), Some(agent)) = (self.limits.memory_bytes, self.agent) else {
            return std::future::pending().await;
        };
        loop {
            let start = clock::now();
            let looking = tokio::task::spawn_blocking(move || measure_memory(agent, limit));
            let used = looking.await.unwrap_or(0);
            if used > limit {
                return self.memory_exceeded_error(used, limit);
            }
            let took = Duration::from_millis(clock::now().ms_since(start) * PAUSE_FACTOR);
            tokio::time::sleep(POLL.max(took)).await;
        }
    }

    /// Waits until the kernel has ended a process of the job: others may go on without it.
    async fn wait_for_full_group(&self) -> Error {
        loop {
            tokio::time::sleep(POLL).await;
            if self
                .look_at_group()
                .await
                .is_some_and(|used| used.is_exceeded)
            {
                return self.full_group_error();
            }
        }
    }

    async fn look_at_group(&self) -> Option<GroupUsage> {
        let group = self.group.clone()?;
        let looking = tokio::task::spawn_blocking(move || group.read_usage());
        match looking.await.map_err(std::io::Error::other).flatten() {
            Ok(used) => {
                self.seen_bytes_max.fetch_max(used.bytes, Ordering::Relaxed);
                Some(used)
            }
            Err(error) => {
                tracing::warn!(%error, job = self.job, "the control group of a job is unreadable");
                None
            }
        }
    }

    /// Adds to a report what the job's group says, also that a process was ended there: then the
    /// job has failed, whatever its main process made of it.
    pub(super) async fn complete_report(&self, report: JobReport) -> JobReport {
        let Some(used) = self.look_at_group().await else {
            return report;
        };
        // A process may have pages of files, and others may have memory at the same time.
        let largest = report.memory_bytes_max.min(used.bytes_max);
        let memory_bytes_max = largest.max(self.seen_bytes_max.load(Ordering::Relaxed));
        let is_own_end = match &report.outcome {
            JobOutcome::Exited(_) | JobOutcome::Signaled(_) | JobOutcome::NotStarted(_) => true,
            JobOutcome::EnvironmentFailed(error) => error.code == ErrorCode::ServerFault,
            JobOutcome::Killed => false,
        };
        let outcome = match used.is_exceeded && is_own_end {
            true => JobOutcome::EnvironmentFailed(self.full_group_error()),
            false => report.outcome,
        };
        JobReport {
            outcome,
            memory_bytes_max,
            ..report
        }
    }

    fn full_group_error(&self) -> Error {
        let text = format!(
            "job '{}' wanted more memory than it asked for, and its request_memory is {} MB",
            self.job,
            self.limits.memory_bytes.unwrap_or(0) / 1_000_000
        );
        Error::new(ErrorCode::MemoryExceeded, text)
    }

    fn memory_exceeded_error(&self, used: u64, limit: u64) -> Error {
        let text = format!(
            "job '{}' used {} MB of memory, and its request_memory is {} MB",
            self.job,
            used.div_ceil(1_000_000),
            limit / 1_000_000
        );
        Error::new(ErrorCode::MemoryExceeded, text)
    }
}

/// Memory of the processes below an agent, in bytes. Exact only if it may exceed `limit`. Blocks.
fn measure_memory(agent: u32, limit: u64) -> u64 {
    let processes = find_descendants(agent);
    let job = &processes[1..];
    // Resident pages count files, and shared ones several times: it is never less.
    let resident = job.iter().filter_map(|process| resident_bytes(*process));
    let most: u64 = resident.sum();
    if most <= limit {
        return most;
    }
    job.iter()
        .filter_map(|process| memory_bytes(*process))
        .sum()
}

fn resident_bytes(process: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/statm")).ok()?;
    let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Private and named memory of a process, with its part of what it shares with others.
fn memory_bytes(process: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let kib_of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let number = line.trim().trim_end_matches("kB").trim();
        number.parse::<u64>().ok()
    };
    let kib = match (kib_of("Pss_Anon:"), kib_of("Pss_Shmem:")) {
        (Some(anonymous), Some(shared)) => anonymous + shared,
        // Kernels before 5.4 do not tell them apart.
        _ => kib_of("Anonymous:")?,
    };
    Some(kib * 1_024)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn memory_of_all_processes_counts_once() {
        // Four processes share the 40 MB of the first.
        let program = "import os, sys\nown = os.getpid()\nx = b'x' * 40_000_000\nos.fork()\n\
                       os.fork()\nif os.getpid() == own:\n    print(1, flush=True)\n\
                       sys.stdin.read()";
        // The shell is there in place of an agent.
        let mut job = Command::new("sh")
            .args(["-c", "python3 -c \"$0\"; true", program])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let said = job.stdout.take().expect("a pipe");
        let read = BufReader::new(said).read_line(&mut String::new());
        read.expect("it is ready");
        let used = measure_memory(job.id(), 0);
        let most = measure_memory(job.id(), u64::MAX);
        // The end of its input ends it.
        job.wait().expect("it ends");
        // One of them may have begun while the others were measured.
        assert!((29_000_000..110_000_000).contains(&used), "{used}");
        assert!(most >= 120_000_000, "{most}");
    }

    #[tokio::test]
    async fn jobs_end_at_their_run_time() {
        let watch = JobWatch {
            job: "a".to_owned(),
            limits: JobLimits {
                runtime_ms: Some(20),
                ..JobLimits::default()
            },
            agent: None,
            group: None,
            seen_bytes_max: AtomicU64::new(0),
        };
        let error = watch.wait_for_excess().await;
        assert_eq!(error.code, ErrorCode::RuntimeExceeded);
    }
}
