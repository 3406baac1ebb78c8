//! The rules of a pool, one by one, and all of them under random events.

use super::*;

/// A controller with a clock and an imagined queue.
struct Bench {
    pool: PoolController,
    now_ms: u64,
    states: BTreeMap<PilotId, PilotState>,
}

fn id(number: u64) -> PilotId {
    PilotId(number.to_string())
}

const RUNNING: PilotState = PilotState::Running { left_s: None };

impl Bench {
    /// A pool of so many nodes that accepts pilots and has as much work.
    fn open(nodes: usize) -> Self {
        let mut bench = Self::unchecked(nodes);
        assert_eq!(bench.poll(), [PoolAction::Check]);
        bench
    }

    fn unchecked(nodes: usize) -> Self {
        let mut bench = Self {
            pool: PoolController::new(PoolSettings::new(nodes, Some(3_600))),
            now_ms: 0,
            states: BTreeMap::new(),
        };
        let demand = Demand {
            nodes,
            longest_job_s: 0,
        };
        assert_eq!(bench.tell(PoolEvent::DemandChanged(demand)), []);
        bench
    }

    fn tell(&mut self, event: PoolEvent) -> Vec<PoolAction> {
        let mut actions = Vec::new();
        self.pool.step(self.now_ms, event, &mut actions);
        actions
    }

    fn poll(&mut self) -> Vec<PoolAction> {
        self.tell(PoolEvent::Polled(self.states.clone()))
    }

    /// Begins with one accepted pilot in the queue, number 1.
    fn with_queued_pilot(nodes: usize) -> Self {
        let mut bench = Self::open(nodes);
        let first = bench.tell(PoolEvent::Checked(Ok(())));
        assert_eq!(first, [PoolAction::Submit(PilotNumber(1))]);
        assert_eq!(bench.accept(1), []);
        bench
    }

    fn accept(&mut self, number: u64) -> Vec<PoolAction> {
        self.states.insert(id(number), PilotState::Waiting);
        self.tell(PoolEvent::Submitted {
            pilot: PilotNumber(number),
            id: id(number),
        })
    }

    fn set(&mut self, number: u64, state: PilotState) -> Vec<PoolAction> {
        self.states.insert(id(number), state);
        self.poll()
    }

    fn list_nodes(&mut self, nodes: &[(u64, NodeUse)]) -> Vec<PoolAction> {
        let nodes = nodes
            .iter()
            .map(|(number, node)| (PilotNumber(*number), *node));
        self.tell(PoolEvent::NodesListed(nodes.collect()))
    }

    fn demand(&mut self, nodes: usize, longest_job_s: u64) -> Vec<PoolAction> {
        self.tell(PoolEvent::DemandChanged(Demand {
            nodes,
            longest_job_s,
        }))
    }
}

fn idle_node(sole_copies: u32) -> NodeUse {
    NodeUse {
        jobs: 0,
        sole_copies,
    }
}

#[test]
fn dry_run_precedes_the_first_pilot() {
    let mut bench = Bench::unchecked(2);
    assert_eq!(bench.poll(), [PoolAction::Check]);
    assert_eq!(bench.poll(), []);
    let first = bench.tell(PoolEvent::Checked(Ok(())));
    assert_eq!(first, [PoolAction::Submit(PilotNumber(1))]);
}

#[test]
fn failed_dry_run_pauses_the_pool() {
    let mut bench = Bench::open(2);
    let said = "invalid partition".to_owned();
    let paused = bench.tell(PoolEvent::Checked(Err(said.clone())));
    assert_eq!(
        paused,
        [PoolAction::ReportPause(PauseReason::CheckFailed(said))]
    );
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.tell(PoolEvent::ResumeRequested), [PoolAction::Check]);
}

#[test]
fn one_pilot_waits_at_a_time() {
    let mut bench = Bench::with_queued_pilot(3);
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.set(1, RUNNING), [PoolAction::Submit(PilotNumber(2))]);
    assert_eq!(bench.accept(2), []);
    assert_eq!(bench.set(2, RUNNING), [PoolAction::Submit(PilotNumber(3))]);
    assert_eq!(bench.accept(3), []);
    // The pool is full.
    assert_eq!(bench.set(3, RUNNING), []);
}

#[test]
fn three_failed_starts_pause_the_pool() {
    let mut bench = Bench::with_queued_pilot(1);
    assert_eq!(
        bench.set(1, PilotState::Ended),
        [PoolAction::Submit(PilotNumber(2))]
    );
    bench.accept(2);
    assert_eq!(
        bench.set(2, PilotState::Ended),
        [PoolAction::Submit(PilotNumber(3))]
    );
    bench.accept(3);
    let paused = bench.set(3, PilotState::Ended);
    assert_eq!(
        paused,
        [PoolAction::ReportPause(PauseReason::StartsFailed(3))]
    );
    assert_eq!(bench.pool.pause(), Some(&PauseReason::StartsFailed(3)));
}

#[test]
fn live_node_clears_failed_starts() {
    let mut bench = Bench::with_queued_pilot(1);
    bench.set(1, PilotState::Ended);
    bench.accept(2);
    bench.set(2, PilotState::Ended);
    bench.accept(3);
    bench.list_nodes(&[(3, NodeUse::default())]);
    // It was alive: this end is no failed start.
    assert_eq!(
        bench.set(3, PilotState::Ended),
        [PoolAction::Submit(PilotNumber(4))]
    );
    bench.accept(4);
    assert_eq!(
        bench.set(4, PilotState::Ended),
        [PoolAction::Submit(PilotNumber(5))]
    );
}

#[test]
fn ten_rejected_submissions_pause_the_pool() {
    let mut bench = Bench::open(1);
    bench.tell(PoolEvent::Checked(Ok(())));
    for number in 1..=10 {
        let told = bench.tell(PoolEvent::SubmissionRejected {
            pilot: PilotNumber(number),
            reason: "no account".to_owned(),
        });
        let expected = if number < 10 {
            PoolAction::Submit(PilotNumber(number + 1))
        } else {
            let reason = PauseReason::SubmissionsRejected(10, "no account".to_owned());
            PoolAction::ReportPause(reason)
        };
        assert_eq!(told, [expected]);
    }
}

#[test]
fn silent_engine_gets_no_submissions() {
    let mut bench = Bench::with_queued_pilot(2);
    bench.set(1, PilotState::Waiting);
    bench.tell(PoolEvent::EngineSilent);
    assert_eq!(bench.list_nodes(&[(1, NodeUse::default())]), []);
    assert_eq!(bench.pool.pilots().len(), 1);
    assert_eq!(bench.set(1, RUNNING), [PoolAction::Submit(PilotNumber(2))]);
}

#[test]
fn unconfirmed_submission_is_cancelled_by_name() {
    let mut bench = Bench::open(1);
    bench.tell(PoolEvent::Checked(Ok(())));
    let pilot = PilotNumber(1);
    assert_eq!(bench.tell(PoolEvent::SubmissionUnconfirmed { pilot }), []);
    let again = bench.poll();
    assert_eq!(again[0], PoolAction::ReleaseName(pilot));
    assert_eq!(again[1], PoolAction::Submit(PilotNumber(2)));
    bench.tell(PoolEvent::NameReleased { pilot });
    bench.accept(2);
    assert_eq!(bench.poll(), []);
}

#[test]
fn unknown_pilot_is_replaced() {
    let mut bench = Bench::with_queued_pilot(1);
    bench.list_nodes(&[(1, NodeUse::default())]);
    assert_eq!(
        bench.set(1, PilotState::Ended),
        [PoolAction::Submit(PilotNumber(2))]
    );
    assert_eq!(bench.pool.ids(), []);
}

#[test]
fn pilot_is_never_shorter_than_jobs() {
    let mut bench = Bench::open(1);
    bench.demand(1, 7_200);
    let paused = bench.tell(PoolEvent::Checked(Ok(())));
    let reason = PauseReason::PilotsTooShort(3_600, 7_200);
    assert_eq!(paused, [PoolAction::ReportPause(reason)]);
}

#[test]
fn requeued_pilot_keeps_its_place() {
    let mut bench = Bench::with_queued_pilot(1);
    bench.list_nodes(&[(1, NodeUse::default())]);
    assert_eq!(
        bench.set(1, PilotState::Ending),
        [PoolAction::Submit(PilotNumber(2))]
    );
    // Rejected or not, the requeued pilot counts again.
    let reason = "busy".to_owned();
    let pilot = PilotNumber(2);
    bench.states.insert(id(1), PilotState::Waiting);
    bench.poll();
    bench.tell(PoolEvent::SubmissionRejected { pilot, reason });
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.set(1, RUNNING), []);
    assert_eq!(bench.pool.ids(), [id(1)]);
}

#[test]
fn sole_copy_keeps_an_idle_node() {
    let mut bench = Bench::with_queued_pilot(1);
    bench.set(1, RUNNING);
    bench.list_nodes(&[(1, idle_node(1))]);
    bench.demand(0, 0);
    bench.now_ms = 60_000;
    let copied = bench.list_nodes(&[(1, idle_node(1))]);
    assert_eq!(copied, [PoolAction::CopySoleVolumes(PilotNumber(1))]);
    assert_eq!(bench.list_nodes(&[(1, idle_node(1))]), []);
    assert_eq!(
        bench.list_nodes(&[(1, idle_node(0))]),
        [PoolAction::Cancel(id(1))]
    );
}

#[test]
fn busy_node_outlives_the_demand() {
    let mut bench = Bench::with_queued_pilot(1);
    bench.set(1, RUNNING);
    let busy = NodeUse {
        jobs: 1,
        sole_copies: 0,
    };
    bench.list_nodes(&[(1, busy)]);
    bench.demand(0, 0);
    bench.now_ms = 600_000;
    assert_eq!(bench.list_nodes(&[(1, busy)]), []);
    assert_eq!(bench.list_nodes(&[(1, idle_node(0))]), []);
    bench.now_ms = 660_000;
    assert_eq!(bench.poll(), [PoolAction::Cancel(id(1))]);
}

#[test]
fn queued_pilot_ends_with_the_demand() {
    let mut bench = Bench::with_queued_pilot(2);
    assert_eq!(bench.demand(0, 0), [PoolAction::Cancel(id(1))]);
}

#[test]
fn hung_start_is_cancelled() {
    let mut bench = Bench::with_queued_pilot(1);
    bench.set(1, RUNNING);
    bench.now_ms = 119_999;
    assert_eq!(bench.poll(), []);
    bench.now_ms = 120_000;
    let ended = bench.poll();
    assert_eq!(
        ended,
        [
            PoolAction::Cancel(id(1)),
            PoolAction::Submit(PilotNumber(2))
        ]
    );
}

#[test]
fn failed_cancel_is_repeated() {
    let mut bench = Bench::with_queued_pilot(1);
    assert_eq!(bench.demand(0, 0), [PoolAction::Cancel(id(1))]);
    assert_eq!(bench.tell(PoolEvent::CancelFailed(id(1))), []);
    assert_eq!(bench.poll(), [PoolAction::Cancel(id(1))]);
    assert_eq!(bench.poll(), []);
}

#[test]
fn dry_run_without_answer_is_repeated() {
    let mut bench = Bench::open(1);
    assert_eq!(bench.tell(PoolEvent::EngineSilent), []);
    assert_eq!(bench.poll(), [PoolAction::Check]);
}

#[test]
fn closed_pool_ends_all_pilots() {
    let mut bench = Bench::with_queued_pilot(2);
    bench.set(1, RUNNING);
    bench.accept(2);
    bench.list_nodes(&[(1, idle_node(3))]);
    let ended = bench.tell(PoolEvent::CloseRequested);
    assert_eq!(
        ended,
        [PoolAction::Cancel(id(2)), PoolAction::Cancel(id(1))]
    );
    assert!(!bench.pool.is_closed());
    bench.states.insert(id(1), PilotState::Ended);
    assert_eq!(bench.set(2, PilotState::Ended), []);
    assert!(bench.pool.is_closed());
}

#[test]
fn pilot_accepted_after_closing_is_ended() {
    let mut bench = Bench::open(1);
    bench.tell(PoolEvent::Checked(Ok(())));
    assert_eq!(bench.tell(PoolEvent::CloseRequested), []);
    assert!(!bench.pool.is_closed());
    assert_eq!(bench.accept(1), [PoolAction::Cancel(id(1))]);
}

#[test]
fn resumed_pool_recognises_its_pilots() {
    let settings = PoolSettings::new(2, None);
    let pilots = BTreeMap::from([(PilotNumber(4), Some(id(4))), (PilotNumber(5), None)]);
    let mut bench = Bench::unchecked(2);
    bench.pool = PoolController::resume(settings, pilots, 6);
    bench.demand(1, 0);
    assert_eq!(
        bench.set(4, RUNNING),
        [PoolAction::ReleaseName(PilotNumber(5))]
    );
    assert_eq!(bench.pool.ids(), [id(4)]);
    assert_eq!(bench.pool.next_number(), 6);
}

/// Whatever a queue does, at most one pilot waits and the pool keeps its size.
#[test]
fn random_queues_never_exceed_the_bounds() {
    for seed in 1..=200_u64 {
        let mut random = seed;
        let mut choose = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let mut bench = Bench::open(4);
        let mut actions = bench.tell(PoolEvent::Checked(Ok(())));
        for _ in 0..300 {
            bench.now_ms += choose(40_000);
            for action in std::mem::take(&mut actions) {
                let more = match action {
                    PoolAction::Submit(PilotNumber(number)) if choose(8) > 0 => {
                        bench.accept(number)
                    }
                    PoolAction::Submit(pilot) => {
                        bench.tell(PoolEvent::SubmissionUnconfirmed { pilot })
                    }
                    PoolAction::Cancel(id) => {
                        bench.states.insert(id, PilotState::Ended);
                        Vec::new()
                    }
                    PoolAction::ReleaseName(pilot) => bench.tell(PoolEvent::NameReleased { pilot }),
                    PoolAction::ReportPause(_) => bench.tell(PoolEvent::ResumeRequested),
                    PoolAction::Check => bench.tell(PoolEvent::Checked(Ok(()))),
                    PoolAction::CopySoleVolumes(_) => Vec::new(),
                };
                actions.extend(more);
            }
            if let Some(id) = bench
                .pool
                .ids()
                .get(usize::try_from(choose(4)).unwrap_or(0))
            {
                let states = [PilotState::Waiting, RUNNING, RUNNING, PilotState::Ended];
                let state = states[usize::try_from(choose(4)).unwrap_or(0)];
                bench.states.insert(id.clone(), state);
            }
            actions.extend(bench.poll());
            let pilots = bench.pool.pilots();
            let count = |status| pilots.iter().filter(|pilot| pilot.status == status).count();
            assert!(
                count(PilotStatus::Submitting) <= 1,
                "seed {seed}: {pilots:?}"
            );
            assert!(
                pilots
                    .iter()
                    .filter(|p| p.status != PilotStatus::Leaving)
                    .count()
                    <= 4
            );
        }
    }
}
