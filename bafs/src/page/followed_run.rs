//! One run whose journal is followed for whoever looks: read when somebody asks, and not more often
//! than is useful.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bafs_api::{
    HistoryLineView, HistoryPage, JobDetails, LogView, RunCommand, RunSummary, RunView,
};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_sched::driver::CancelHandle;
use bafs_sched::io::user_commands::send_command;
use bafs_sched::{Progress, RunFollower, Scheduler, UserCommand};
use bafs_server::clock;
use bafs_sim::strategy_selector::ModelSelector;
use bafs_workflow::JobIndex;

use super::job_output::JobOutput;
use super::run_view::{Circumstances, build_run_view, describe_job};
use super::traffic_meter::TrafficMeter;
use crate::history;

/// Pause between two looks at the journal; a person sees no difference to a shorter one.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);

/// Looking takes at most one part in so many of the time: the run needs the processors.
const LOOK_PAUSE_FACTOR: u32 = 4;

/// Without news a view is made anew after so long, for the time that has passed.
const IDLE_INTERVAL: Duration = Duration::from_secs(2);

/// Where a run is, and what else is known of it.
#[derive(Debug)]
pub(super) struct FollowedPlace {
    /// By what it is known, if not by its own id.
    pub(super) id: Option<String>,
    pub(super) journal: PathBuf,
    /// Directory of what its jobs print, if that is kept.
    pub(super) logs: Option<PathBuf>,
    /// Whoever can cancel it as a whole.
    pub(super) cancel: Option<CancelHandle>,
    pub(super) traffic: TrafficMeter,
}

/// A run that is followed.
pub(super) struct FollowedRun {
    place: FollowedPlace,
    output: JobOutput,
    look: Mutex<Option<Look>>,
}

/// What was seen last.
struct Look {
    follower: RunFollower,
    view: Arc<RunView>,
    scheduler: Arc<Scheduler>,
    progress: Progress,
    /// When the view was made, and how long that took.
    at: Instant,
    cost: Duration,
    seen: Seen,
    revision: u64,
}

/// What makes another view.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Seen {
    steps: u64,
    is_running: bool,
    samples: usize,
}

impl FollowedRun {
    pub(super) fn new(place: FollowedPlace) -> Self {
        Self {
            output: JobOutput::new(place.logs.clone()),
            place,
            look: Mutex::new(None),
        }
    }

    /// The run in short.
    pub(super) fn summary(&self) -> Result<RunSummary> {
        Ok(self.look()?.view.summary.clone())
    }

    /// The run as it is now.
    pub(super) fn view(&self) -> Result<Arc<RunView>> {
        Ok(self.look()?.view.clone())
    }

    /// How far it is, as it is counted everywhere.
    pub(super) fn progress(&self) -> Result<Progress> {
        Ok(self.look()?.progress)
    }

    pub(super) fn describe_job(&self, job: u32) -> Result<JobDetails> {
        let scheduler = self.look()?.scheduler.clone();
        Ok(describe_job(
            scheduler.workflow(),
            check_job(&scheduler, job)?,
        ))
    }

    pub(super) fn explain_jobs(&self, jobs: &[u32]) -> Result<Vec<Option<String>>> {
        let scheduler = self.look()?.scheduler.clone();
        let explain = |job: &u32| Ok(scheduler.describe_wait(check_job(&scheduler, *job)?));
        jobs.iter().map(explain).collect()
    }

    pub(super) fn read_log(&self, job: u32, attempt: Option<u32>) -> Result<LogView> {
        let scheduler = self.look()?.scheduler.clone();
        self.output
            .read(&scheduler, check_job(&scheduler, job)?, attempt)
    }

    pub(super) fn read_history(&self, from: u64, limit: usize) -> Result<HistoryPage> {
        let look = self.look()?;
        let (first, lines) = look.follower.lines(from);
        let numbered = lines.take(limit).zip(first..);
        let lines = numbered.map(|(line, number)| HistoryLineView {
            number,
            at_ms: line.at_ms,
            subjects: line.subjects.clone(),
            text: line.text.clone(),
        });
        Ok(HistoryPage {
            lines: lines.collect(),
            total: look.follower.line_count(),
        })
    }

    pub(super) fn send_command(&self, command: RunCommand) -> Result<()> {
        let look = self.look()?;
        if !look.view.summary.can_steer {
            let text = "no scheduler runs it; `bafs run` with the same journal resumes a run that \
                        has not ended";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let job = |job| check_job(&look.scheduler, job);
        let command = match command {
            RunCommand::CancelRun => return self.cancel(),
            RunCommand::HoldRun => UserCommand::Hold { job: None },
            RunCommand::ReleaseRun => UserCommand::Release { job: None },
            RunCommand::CancelPipeline(at) => UserCommand::Cancel { job: job(at)? },
            RunCommand::HoldPipeline(at) => UserCommand::Hold {
                job: Some(job(at)?),
            },
            RunCommand::ReleasePipeline(at) => UserCommand::Release {
                job: Some(job(at)?),
            },
            RunCommand::SetPriority(at, priority) => UserCommand::SetPriority {
                job: job(at)?,
                priority,
            },
        };
        send_command(&self.place.journal, look.follower.header(), command)
    }

    fn cancel(&self) -> Result<()> {
        match &self.place.cancel {
            Some(cancel) => {
                cancel.request_cancel();
                Ok(())
            }
            None => {
                let text = "another process runs it: press Ctrl-C there, or hold it";
                Err(Error::new(ErrorCode::WrongState, text))
            }
        }
    }

    /// Looks at the journal, unless it was looked at just now.
    fn look(&self) -> Result<LookGuard<'_>> {
        let mut guard = self.look.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(look) = guard.as_ref() {
            let pause = LOOK_INTERVAL.max(look.cost * LOOK_PAUSE_FACTOR);
            if look.at.elapsed() < pause {
                return Ok(LookGuard(guard));
            }
        }
        let begin = now();
        let mut follower = match guard.take() {
            None => self.open_follower()?,
            Some(mut look) => {
                look.follower.read_news()?;
                let seen = self.see(&look.follower);
                let is_idle = seen == look.seen && look.at.elapsed() < IDLE_INTERVAL;
                let is_final = seen == look.seen && !look.view.summary.state.is_active();
                if is_idle || is_final {
                    *guard = Some(look);
                    return Ok(LookGuard(guard));
                }
                let revision = look.revision + u64::from(seen != look.seen);
                *guard = Some(self.build(look.follower, seen, revision, begin));
                return Ok(LookGuard(guard));
            }
        };
        follower.read_news()?;
        let seen = self.see(&follower);
        *guard = Some(self.build(follower, seen, 1, begin));
        Ok(LookGuard(guard))
    }

    fn open_follower(&self) -> Result<RunFollower> {
        let journal = &self.place.journal;
        if !journal.exists() {
            return Err(Error::new(ErrorCode::Busy, "the run has not begun yet"));
        }
        RunFollower::open(journal, Arc::new(ModelSelector))
    }

    fn see(&self, follower: &RunFollower) -> Seen {
        Seen {
            steps: follower.steps(),
            is_running: history::is_journal_open(&self.place.journal),
            samples: self.place.traffic.sample_count(),
        }
    }

    fn build(&self, follower: RunFollower, seen: Seen, revision: u64, begin: Instant) -> Look {
        let (timeline, scheduler) = follower.snapshot();
        let so_far_ms = match seen.steps {
            0 => 0,
            _ => clock::now().ms_since(timeline.began_at),
        };
        let around = Circumstances {
            is_running: seen.is_running,
            can_cancel: self.place.cancel.is_some(),
            so_far_ms,
            revision,
            traffic: self.place.traffic.samples_since(timeline.began_at),
        };
        let mut view = build_run_view(&timeline, &scheduler, around);
        if let Some(id) = &self.place.id {
            view.summary.id.clone_from(id);
        }
        Look {
            follower,
            view: Arc::new(view),
            scheduler: Arc::new(scheduler),
            progress: timeline.progress,
            at: now(),
            cost: begin.elapsed(),
            seen,
            revision,
        }
    }
}

/// A look that is there.
struct LookGuard<'r>(MutexGuard<'r, Option<Look>>);

impl std::ops::Deref for LookGuard<'_> {
    type Target = Look;

    fn deref(&self) -> &Look {
        self.0.as_ref().expect("a guard is made with a look")
    }
}

fn check_job(scheduler: &Scheduler, job: u32) -> Result<JobIndex> {
    match (job as usize) < scheduler.workflow().jobs.len() {
        true => Ok(JobIndex(job)),
        false => Err(Error::new(ErrorCode::NotFound, "the run has no such job")),
    }
}

#[expect(clippy::disallowed_methods, reason = "how long looking took")]
fn now() -> Instant {
    Instant::now()
}
