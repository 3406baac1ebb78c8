//! Jobs that used more memory than they asked for: they run again with more, as declared.

use bafs_proto::ErrorCode;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::JobIndex;

use crate::decision::Decision;
use crate::describe::{bytes_only, describe_bytes};
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;

impl State {
    /// A job ended without success. Runs it again with the next value that it declares, if it used
    /// up its memory and a node has so much. Answers whether it does.
    pub(crate) fn retry_with_more_memory(&mut self, job: JobIndex, report: &JobReport) -> bool {
        let JobOutcome::EnvironmentFailed(error) = &report.outcome else {
            return false;
        };
        if error.code != ErrorCode::MemoryExceeded {
            return false;
        }
        let tries = self.graph.job(job).failure_history.used_up_memory + 1;
        let next = self.graph.workflow.job(job).memory_of_try(tries);
        if next <= self.memory_of(job) || next > self.fleet.largest_memory() {
            return false;
        }
        self.graph.job_mut(job).failure_history.used_up_memory = tries;
        let node = self.attempts.get(&job).map(|attempt| attempt.server);
        self.tell(RunWarning {
            job: Some(job),
            volume: None,
            node,
            text: format!(
                "{}: it runs again with {}",
                error.detail,
                describe_bytes(bytes_only(next))
            ),
        });
        self.abandon_attempt(job);
        self.commit(Decision::Retry { job, pause_ms: 0 });
        true
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::Error;
    use bafs_proto::ids::{ExecutionId, RunId, ServerId};
    use bafs_proto::time::Time;

    use super::*;
    use crate::{Action, Event, NodeInfo, Scheduler, Settings, Space};

    const GB: u64 = 1_000_000_000;

    fn scheduler_of(text: &str) -> Scheduler {
        let none = |path: &str| Err(path.to_owned());
        let workflow = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = workflow.expect("it is right").workflow;
        Scheduler::new(RunId(1), workflow, Settings::default())
    }

    /// A node of four slots with so much memory.
    fn node(id: u64, memory_bytes: u64) -> NodeInfo {
        let capacity = Space {
            bytes: GB,
            files: 1_000,
        };
        NodeInfo {
            memory_bytes,
            ..NodeInfo::single_group(ServerId(id), capacity, 4)
        }
    }

    /// The starts that follow from an event: execution, node and memory.
    fn starts(
        scheduler: &mut Scheduler,
        at: u64,
        event: Event,
    ) -> Vec<(ExecutionId, ServerId, u64)> {
        let mut actions = Vec::new();
        scheduler.step(Time(at), event, &mut actions);
        let started = actions.into_iter().filter_map(|action| match action {
            Action::StartJob {
                execution,
                server,
                memory_bytes,
                ..
            } => Some((execution, server, memory_bytes)),
            _ => None,
        });
        started.collect()
    }

    fn ended(execution: ExecutionId, outcome: JobOutcome) -> Event {
        let report = JobReport {
            outcome,
            wall_ms: 1,
            cpu_ms: 1,
            memory_bytes_max: 0,
            output_tail: String::new(),
            volumes: Vec::new(),
        };
        Event::JobEnded { execution, report }
    }

    #[test]
    fn jobs_share_the_memory_of_their_node() {
        let text = "for i in 1..3\njob a$(i) {\nexecutable = x\nrequest_memory = 4 GB\n}\nend\n";
        let mut scheduler = scheduler_of(text);
        let listed = Event::nodes_listed(vec![node(1, 10 * GB)]);
        let first = starts(&mut scheduler, 1, listed);
        assert_eq!(first.len(), 2, "a third one has no memory");
        let (execution, ..) = first[0];
        starts(&mut scheduler, 2, Event::JobStarted { execution });
        let next = starts(&mut scheduler, 3, ended(execution, JobOutcome::Exited(0)));
        assert_eq!(next.len(), 1);
    }

    #[test]
    fn used_up_memory_asks_for_the_next_value() {
        let text = "job a {\nexecutable = x\nrequest_memory = 2 GB, 8 GB\n}\n";
        let mut scheduler = scheduler_of(text);
        let listed = Event::nodes_listed(vec![node(1, 4 * GB), node(2, 16 * GB)]);
        let first = starts(&mut scheduler, 1, listed);
        let [(execution, _, memory)] = first[..] else {
            panic!("{first:?}")
        };
        assert_eq!(memory, 2 * GB);
        let error = Error::new(ErrorCode::MemoryExceeded, "job 'a' used too much");
        let excess = || JobOutcome::EnvironmentFailed(error.clone());
        starts(&mut scheduler, 2, Event::JobStarted { execution });
        let second = starts(&mut scheduler, 3, ended(execution, excess()));
        let [(execution, server, memory)] = second[..] else {
            panic!("{second:?}")
        };
        assert_eq!(
            (server, memory),
            (ServerId(2), 8 * GB),
            "only there is so much"
        );
        starts(&mut scheduler, 4, Event::JobStarted { execution });
        let third = starts(&mut scheduler, 5, ended(execution, excess()));
        assert!(third.is_empty(), "there is no third value");
        let reason = &scheduler.failures[0].reason;
        assert!(reason.contains("used too much; ask for more"), "{reason}");
    }

    #[test]
    fn impossible_memory_is_told_at_once() {
        let text = "job a {\nexecutable = x\nrequest_memory = 20 GB\n}\n";
        let mut scheduler = scheduler_of(text);
        let listed = Event::nodes_listed(vec![node(1, 16 * GB)]);
        assert!(starts(&mut scheduler, 1, listed).is_empty());
        let told = crate::policy::View::new(&scheduler.state).misfit();
        let told = told.expect("no node has so much");
        assert!(
            told.contains("20.0 GB of memory") || told.contains("20 GB of memory"),
            "{told}"
        );
        // A node that does not say what it has is tried.
        let other = Event::nodes_listed(vec![node(2, 0)]);
        assert_eq!(starts(&mut scheduler, 2, other).len(), 1);
    }
}
