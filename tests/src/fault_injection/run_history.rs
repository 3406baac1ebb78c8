//! The history of a run, from its journal: where and when jobs ran, where volumes were, and why a
//! job ran again. Changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use bafs_proto::ids::{ExecutionId, ServerId};
use bafs_proto::message::JobOutcome;
use bafs_sched::io::journal;
use bafs_sched::replay::{HistoryLine, replay_history};
use bafs_sched::{Action, Event, Scheduler};
use bafs_sim::strategy_selector::ModelSelector;
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind, Workflow};

/// One attempt to run a job.
#[derive(Debug, Clone)]
pub struct Execution {
    /// Name of the job.
    pub name: String,
    /// The job.
    pub job: JobIndex,
    /// Name of the node.
    pub node: String,
    /// Names of the nodes that its volumes are on, its caches too.
    pub volumes: BTreeSet<String>,
    /// When it was to start, by the machine's clock in milliseconds.
    pub at_ms: u64,
    /// Whether a node took it.
    pub has_begun: bool,
    /// Whether it ended with 0.
    pub has_succeeded: bool,
}

/// Something that was made to fail.
#[derive(Debug, Clone)]
pub struct InjectedFault {
    /// The description, for people.
    pub text: String,
    /// Since when, by the machine's clock in milliseconds.
    pub at_ms: u64,
    /// Until when.
    pub until_ms: u64,
    /// Servers that it concerns. Faults of schedulers and of the catalog affect no execution.
    pub servers: BTreeSet<String>,
    /// The only affected user, if there is one.
    pub user: Option<String>,
}

/// A job that ran once more.
#[derive(Debug, Clone)]
pub struct Rerun {
    /// Its name.
    pub job: String,
    /// The fault that made it so, if one did.
    pub cause: Option<String>,
    /// The journal's records of the job; for people.
    pub journal_lines: Vec<String>,
}

/// A run, from its journal.
#[derive(Debug)]
pub struct RunHistory {
    executions: Vec<Execution>,
    workflow: Workflow,
    journal_events: Vec<HistoryLine>,
}

/// Longest time after a fault's end until its node is declared lost and its volumes are missed.
const DETECTION_MS_MAX: u64 = 5_000;

/// Most records of a job that are kept.
const LINES_KEPT_MAX: usize = 14;

/// All attempts of a run to run jobs, in order.
///
/// # Errors
/// The journal cannot be read.
pub fn read_executions(path: &Path) -> Result<Vec<Execution>> {
    Ok(RunHistory::read(path)?.executions)
}

impl RunHistory {
    /// Reads a journal.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let history = journal::read_history(path)?;
        let header = history.header.clone();
        let workflow = Workflow::clone(&header.workflow);
        let mut scheduler = header.new_scheduler(&ModelSelector);
        let mut all: Vec<Execution> = Vec::new();
        let mut at: BTreeMap<ExecutionId, usize> = BTreeMap::new();
        for step in history.steps.clone() {
            let (now, event) = (step.at, step.event);
            if let Some(one) = execution_of(&event).and_then(|id| all.get_mut(*at.get(&id)?)) {
                one.has_begun |= !matches!(event, Event::JobStartFailed { .. });
                if let Event::JobEnded { report, .. } = &event {
                    one.has_succeeded = report.outcome == JobOutcome::Exited(0);
                }
            }
            scheduler.redo(&step.changes);
            for action in step.actions {
                let Action::StartJob {
                    execution,
                    job,
                    server,
                    volumes,
                    ..
                } = action
                else {
                    continue;
                };
                let places = volumes.iter().filter_map(|volume| volume.server);
                at.insert(execution, all.len());
                all.push(Execution {
                    name: workflow.job(job).name.clone(),
                    job,
                    node: node_name(&scheduler, server),
                    volumes: places.map(|server| node_name(&scheduler, server)).collect(),
                    at_ms: now.0,
                    has_begun: false,
                    has_succeeded: false,
                });
            }
        }
        let (lines, _) = replay_history(history, &ModelSelector);
        Ok(Self {
            executions: all,
            workflow,
            journal_events: lines,
        })
    }

    /// Executions that nodes took.
    pub fn count_started(&self) -> usize {
        self.executions.iter().filter(|one| one.has_begun).count()
    }

    /// Each job that ran again, with its cause if that is one of these faults.
    pub fn find_reruns(&self, user: &str, faults: &[InjectedFault]) -> Vec<Rerun> {
        let of_user = |fault: &&InjectedFault| fault.user.as_deref().is_none_or(|it| it == user);
        let faults: Vec<&InjectedFault> = faults.iter().filter(of_user).collect();
        let mut reruns = Vec::new();
        for (before, again) in self.consecutive_executions() {
            let cause = self.find_cause(before, again.at_ms, &faults);
            let told = match cause {
                Some(_) => Vec::new(),
                None => self.journal_lines(&again.name),
            };
            reruns.push(Rerun {
                job: again.name.clone(),
                cause,
                journal_lines: told,
            });
        }
        reruns
    }

    /// Each execution that came after another one of its job, with that.
    fn consecutive_executions(&self) -> impl Iterator<Item = (&Execution, &Execution)> {
        let begun = self.executions.iter().filter(|one| one.has_begun);
        let mut last: BTreeMap<JobIndex, &Execution> = BTreeMap::new();
        begun.filter_map(move |one| Some((last.insert(one.job, one)?, one)))
    }

    /// Why a job ran again at a time after this execution: a fault of its node, of its volumes or,
    /// while it read a cache, of home; or the repetition of a consumer whose input had been
    /// deleted.
    fn find_cause(
        &self,
        before: &Execution,
        again_ms: u64,
        faults: &[&InjectedFault],
    ) -> Option<String> {
        let job = self.workflow.job(before.job);
        let mut held = before.volumes.clone();
        held.insert(before.node.clone());
        let reads_cache = job.mounts.iter().any(|mount| self.is_cache(mount.volume));
        if reads_cache && !before.has_succeeded {
            held.insert("home".to_owned());
        }
        let concerns = |fault: &&&InjectedFault| {
            let is_then =
                fault.at_ms <= again_ms && fault.until_ms + DETECTION_MS_MAX >= before.at_ms;
            is_then && !fault.servers.is_disjoint(&held)
        };
        if let Some(fault) = faults.iter().find(concerns) {
            return Some(fault.text.clone());
        }
        let of_readers = self.readers(before.job).filter_map(|reader| {
            let begun = self.executions.iter().filter(|one| one.has_begun);
            let own = begun.filter(|one| one.job == reader && one.at_ms <= again_ms);
            let last = own.max_by_key(|one| one.at_ms)?;
            let cause = self.find_cause(last, again_ms, faults)?;
            Some(format!("{cause} (for {})", last.name))
        });
        of_readers.into_iter().next()
    }

    fn is_cache(&self, volume: VolumeIndex) -> bool {
        let kind = &self.workflow.volume(volume).kind;
        matches!(kind, VolumeKind::Cache { .. })
    }

    /// Jobs that read what this one writes.
    fn readers(&self, job: JobIndex) -> impl Iterator<Item = JobIndex> {
        let mounts = self.workflow.job(job).mounts.iter();
        let own: BTreeSet<VolumeIndex> = mounts
            .filter(|mount| mount.writable)
            .map(|mount| mount.volume)
            .collect();
        let children = self.workflow.job(job).children.iter().copied();
        children.filter(move |child| {
            let mut mounts = self.workflow.job(*child).mounts.iter();
            mounts.any(|mount| own.contains(&mount.volume))
        })
    }

    /// The last records of a job and of the volumes that it writes, without the assessments of
    /// copies.
    fn journal_lines(&self, job: &str) -> Vec<String> {
        let is_own = |one: &&Execution| one.name == job;
        let index = self.executions.iter().find(is_own).map(|one| one.job);
        let mounts = index.map(|index| &self.workflow.job(index).mounts);
        let written = mounts.into_iter().flatten().filter(|mount| mount.writable);
        let mut names: Vec<&str> = vec![job];
        names.extend(written.map(|mount| self.workflow.volume(mount.volume).name.as_str()));
        let is_about = |line: &&HistoryLine| {
            line.subjects
                .iter()
                .any(|name| names.contains(&name.as_str()))
        };
        let is_weighed = |line: &&HistoryLine| line.text.starts_with("a copy of");
        let lines = self.journal_events.iter().filter(is_about);
        let lines = lines.filter(|line| !is_weighed(line));
        let all: Vec<String> = lines
            .map(|line| format!("{:.1} s: {}", line.at_ms as f64 / 1e3, line.text))
            .collect();
        all[all.len().saturating_sub(LINES_KEPT_MAX)..].to_vec()
    }
}

fn node_name(scheduler: &Scheduler, server: ServerId) -> String {
    let node = scheduler.node(server);
    node.map_or_else(|| server.to_string(), |node| node.name.clone())
}

/// The execution that an event is about.
fn execution_of(event: &Event) -> Option<ExecutionId> {
    match event {
        Event::JobStarted { execution }
        | Event::JobStartFailed { execution, .. }
        | Event::JobEnded { execution, .. }
        | Event::JobUnknown { execution } => Some(*execution),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    const TEXT: &str = "volume v scratch 1 MB\nvolume w scratch 1 MB\n\
        job make {\nexecutable = true\n}\njob use {\nexecutable = true\n}\n\
        parent make child use\nmount v make /v\nmount v use /v ro\nmount w use /w\n";

    /// Each job ran twice, at these times: `make`, `use`, `make`, `use`.
    fn test_history(times: [u64; 4]) -> RunHistory {
        let checked = parse_workflow("test.bafs", TEXT, &|_| Err("none".to_owned()));
        let workflow = checked.expect("a workflow").workflow;
        let one = |at: usize| Execution {
            name: ["make", "use"][at % 2].to_owned(),
            job: JobIndex((at % 2) as u32),
            node: format!("n{}", at % 2 + 1),
            volumes: BTreeSet::from([format!("n{}", at % 2 + 1)]),
            at_ms: times[at],
            has_begun: true,
            has_succeeded: true,
        };
        RunHistory {
            executions: (0..4).map(one).collect(),
            workflow,
            journal_events: Vec::new(),
        }
    }

    fn test_fault(server: &str, at_ms: u64, user: Option<&str>) -> InjectedFault {
        InjectedFault {
            text: format!("kill:{server}"),
            at_ms,
            until_ms: at_ms + 1_000,
            servers: BTreeSet::from([server.to_owned()]),
            user: user.map(str::to_owned),
        }
    }

    fn rerun_causes(past: &RunHistory, faults: &[InjectedFault]) -> Vec<Option<String>> {
        let reruns = past.find_reruns("alice", faults).into_iter();
        reruns.map(|rerun| rerun.cause).collect()
    }

    #[test]
    fn repeated_jobs_require_a_fault_on_their_node() {
        let past = test_history([10_000, 20_000, 60_000, 70_000]);
        let none = vec![None, None];
        assert_eq!(rerun_causes(&past, &[]), none);
        // Of another node, after the second attempt, or for another user only.
        assert_eq!(rerun_causes(&past, &[test_fault("n3", 30_000, None)]), none);
        assert_eq!(rerun_causes(&past, &[test_fault("n1", 80_000, None)]), none);
        assert_eq!(
            rerun_causes(&past, &[test_fault("n1", 30_000, Some("bob"))]),
            none
        );
        let own = rerun_causes(&past, &[test_fault("n1", 30_000, Some("alice"))]);
        assert_eq!(own, [Some("kill:n1".to_owned()), None]);
    }

    #[test]
    fn repeated_reader_reruns_its_producer() {
        let past = test_history([10_000, 20_000, 60_000, 70_000]);
        let both = rerun_causes(&past, &[test_fault("n2", 30_000, None)]);
        let told = ["kill:n2 (for use)", "kill:n2"].map(|text| Some(text.to_owned()));
        assert_eq!(both, told);
    }
}
