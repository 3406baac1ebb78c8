//! Which strategy the scheduler follows, and when the strategy selector is asked for another one.
//! Selects and places nothing.
//!
//! The selector is asked when nodes come or go, when a sixteenth of the jobs is done, when as many
//! of the unknown sizes were measured, and when jobs compute much longer or shorter than they were
//! expected to. A change costs: pipelines that have begun end as they began.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bafs_proto::time::Time;

use super::StrategyChanges;
use crate::policy::View;
use crate::state::compute_time::MEASURED_MIN;
use crate::state::jobs::JobState;
use crate::state::strategy::{Guided, SelectionInputs};
use crate::strategy_selector::{RemainingPipelines, Selection, SelectionQuery, SharedModel};

/// The model is asked again when so many thousandths of all jobs were done since.
const PROGRESS_PERMILLE: u64 = 63;

/// Processors or bytes that must have come or gone, in thousandths of what there was.
const FLEET_PERMILLE: u64 = 50;

/// How often shared nodes are asked what they keep for this run, in milliseconds.
const LOOK_MS: u64 = 1_000;

/// A whole pipeline, in parts that are added up.
const WHOLE: u64 = 1_000_000;

/// What has changed since the selector was asked.
#[derive(Debug, Default)]
pub(crate) struct StrategyReview {
    /// Whether the selector is asked again.
    pub(crate) is_due: bool,
    /// The computing of a job that is expected from now on, in seconds, where it was compared with
    /// what was measured.
    pub(crate) run_s: Option<f64>,
    /// What was found of nodes, where it was looked at.
    pub(crate) nodes: NodeReview,
}

/// What was found of the nodes to plan with.
#[derive(Debug, Default, PartialEq)]
pub(crate) enum NodeReview {
    /// They were not looked at.
    #[default]
    Unseen,
    /// They are about the same; they are looked at again then.
    Similar(Option<Time>),
    /// They are others.
    Different,
}

/// A question to the selector, and its answer.
#[derive(Debug)]
pub(crate) struct SelectorAnswer {
    /// What the question was about.
    pub(crate) inputs: SelectionInputs,
    /// The model with the sizes that are known now, where some were not.
    pub(crate) model: Option<SharedModel>,
    /// What it says; nothing where it has nothing to say.
    pub(crate) selection: Option<Selection>,
}

impl View<'_> {
    /// Whether something has changed that may matter to the selector.
    pub(crate) fn review_strategy(&self, changes: &dyn StrategyChanges) -> StrategyReview {
        let mut review = StrategyReview::default();
        let Some(guided) = &self.guided else {
            return review;
        };
        let Some(asked) = guided.asked else {
            review.is_due = true;
            return review;
        };
        if !changes.may_change() {
            return review;
        }
        let sizes = (self.sizes.learned.len(), self.sizes.kinds.len());
        if is_much_learned(asked.sizes, sizes.0, sizes.1) {
            review.is_due = true;
            return review;
        }
        let done = self.graph.totals.done;
        let total = self.graph.workflow.jobs.len() as u64;
        let progress = done.saturating_sub(asked.done) * 1_000;
        let is_much_done = progress >= (total * PROGRESS_PERMILLE).max(1_000);
        // What was looked at is looked at again when twice as much is known.
        let is_more_known = guided.computing.jobs >= 2 * asked.computed;
        let mut is_contradicted = false;
        if is_much_done || is_more_known {
            let measured_s = self.contradiction_s(guided);
            is_contradicted = measured_s.is_some();
            review.run_s = Some(measured_s.unwrap_or(guided.run_s));
        }
        if !is_much_done && !is_contradicted {
            review.nodes = self.review_nodes(asked);
        }
        review.is_due = is_much_done || is_contradicted || review.nodes == NodeReview::Different;
        review
    }

    /// What a job computes as it was measured, in seconds, where that contradicts what was
    /// expected.
    fn contradiction_s(&self, guided: &Guided) -> Option<f64> {
        let (computing, expected_s) = (&guided.computing, guided.run_s);
        computing.contradiction_s(expected_s, || self.running_ms())
    }

    /// Whether the nodes to plan with are others than when the model was asked.
    fn review_nodes(&self, asked: SelectionInputs) -> NodeReview {
        let is_look_due = asked.look_at.is_some_and(|at| self.now >= at);
        if asked.alive == self.fleet.alive && asked.lost == self.fleet.lost && !is_look_due {
            return NodeReview::Unseen;
        }
        let (cpus, bytes) = self.processors_and_bytes();
        let is_near = |before: u64, now: u64| {
            before.abs_diff(now) * 1_000 <= before.saturating_mul(FLEET_PERMILLE)
        };
        match is_near(asked.cpus, cpus) && is_near(asked.bytes, bytes) {
            true => NodeReview::Similar(self.look_at()),
            false => NodeReview::Different,
        }
    }

    /// When the nodes to plan with may be others though none comes or goes: one that failed does
    /// not come back, or shared ones keep another part for this run.
    fn look_at(&self) -> Option<Time> {
        let is_shared = self.settings.user.is_some();
        let share_at = is_shared.then(|| self.now.plus_ms(LOOK_MS));
        [share_at, self.next_given_up()].into_iter().flatten().min()
    }

    /// Asks the selector. Nothing while there is no node to plan with.
    pub(crate) fn ask_selector(&self) -> Option<SelectorAnswer> {
        let (cpus, bytes) = self.processors_and_bytes();
        let guided = self.guided.as_ref().filter(|_| cpus > 0)?;
        let inputs = SelectionInputs {
            alive: self.fleet.alive,
            lost: self.fleet.lost,
            cpus,
            bytes,
            done: self.graph.totals.done,
            computed: guided.computing.jobs.max(MEASURED_MIN / 2),
            look_at: self.look_at(),
            sizes: self.sizes.learned.len(),
        };
        let model = (!self.sizes.kind_of.is_empty()).then(|| {
            // Unknown sizes are made up, then measured.
            let workflow = match guided.guide.simulated_plan.is_some() {
                true => Cow::Owned(self.sizes.measured(&self.graph.workflow)),
                false => Cow::Borrowed(self.graph.workflow.as_ref()),
            };
            SharedModel(guided.model.0.with_sizes(&workflow))
        });
        let remaining = self.rest();
        // Files may still be on their way home when nothing is left to plan.
        let selection = (remaining.open > 0).then(|| {
            let query = SelectionQuery {
                remaining,
                nodes: self.node_kinds(),
                cpus,
                bytes,
                run_s: guided.run_s,
                has_declared_times: guided.run_s == guided.computing.declared_run_s,
                present: guided.strategy(),
                has_simulated_rules: guided.has_simulated_rules,
                has_measured_sizes: !self.sizes.learned.is_empty(),
            };
            model.as_ref().unwrap_or(&guided.model).0.select(&query)
        });
        Some(SelectorAnswer {
            inputs,
            model,
            selection: selection.flatten(),
        })
    }

    fn rest(&self) -> RemainingPipelines {
        let pipeline = self.guided.as_ref().map_or(&[][..], |it| &it.pipeline[..]);
        let mut left: BTreeMap<u32, (u64, u64, bool)> = BTreeMap::new();
        for (job, first) in self.graph.job_indexes().zip(pipeline) {
            let state = self.graph.state(job);
            let (jobs, undone, has_begun) = left.entry(*first).or_default();
            *jobs += 1;
            *undone += u64::from(!state.is_final());
            *has_begun |= matches!(state, JobState::Done | JobState::Active);
        }
        // What is left of those that have begun, in millionths of a whole one.
        let (mut open, mut fresh, mut begun) = (0, 0, 0);
        for (jobs, undone, has_begun) in left.into_values() {
            open += u64::from(undone > 0);
            match has_begun {
                false if undone > 0 => fresh += 1,
                _ => begun += undone * WHOLE / jobs,
            }
        }
        let needed = self.graph.volume_indexes().filter(|volume| {
            self.graph.is_batch(*volume) && self.graph.volume(*volume).users_left > 0
        });
        let (mut there, mut all) = (0u128, 0u128);
        for volume in needed {
            let bytes = u128::from(self.size_of(volume).bytes);
            all += bytes;
            there += if self.volumes.is_live(volume) {
                bytes
            } else {
                0
            };
        }
        RemainingPipelines {
            open,
            fresh,
            begun: u64::div_ceil(begun, WHOLE),
            missing: match all {
                0 => 0.0,
                _ => (all - there) as f64 / all as f64,
            },
        }
    }
}

/// Whether many more sizes are known than before, of so many: each question looks at the whole
/// workflow.
fn is_much_learned(before: usize, learned: usize, all: usize) -> bool {
    let news = learned.saturating_sub(before);
    let is_much = news as u64 * 1_000 >= all as u64 * PROGRESS_PERMILLE;
    news > 0 && (is_much || learned >= 2 * before || learned == all)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{RunId, ServerId};
    use bafs_workflow::{JobIndex, Workflow, parse_workflow};

    use std::sync::Arc;

    use super::*;
    use crate::Scheduler;
    use crate::Strategy;
    use crate::StrategySelector;
    use crate::StrategySelectorConfig;
    use crate::state::nodes::{FleetNode, Limit};
    use crate::{Event, NodeInfo, Settings, Space};
    use crate::{SimulatedPlan, WorkloadModel};

    /// Selects nothing, and says how many bytes the volumes of the workflow have.
    #[derive(Debug)]
    struct SizeReporter;

    #[derive(Debug)]
    struct ReportedSizes(u64);

    impl StrategySelector for SizeReporter {
        fn model_workload(
            &self,
            workflow: &Workflow,
            _: &StrategySelectorConfig,
        ) -> Option<Arc<dyn WorkloadModel>> {
            Some(ReportedSizes(0).with_sizes(workflow))
        }
    }

    impl WorkloadModel for ReportedSizes {
        fn with_sizes(&self, workflow: &Workflow) -> Arc<dyn WorkloadModel> {
            let sizes = workflow.volumes.iter().map(|volume| volume.size_bytes);
            Arc::new(Self(sizes.sum()))
        }

        fn level_count(&self) -> u64 {
            1
        }

        fn mean_run_s(&self) -> f64 {
            0.0
        }

        fn select(&self, _: &SelectionQuery) -> Option<Selection> {
            Some(Selection {
                strategy: None,
                reason: self.0.to_string(),
                rules: None,
                has_simulated_rules: false,
            })
        }
    }

    fn scheduler(text: &str) -> Scheduler {
        scheduler_with(text, None)
    }

    fn scheduler_with(text: &str, simulated_plan: Option<SimulatedPlan>) -> Scheduler {
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).unwrap().workflow;
        let guide = StrategySelectorConfig {
            home_bytes_per_s: 1_000_000,
            local_bytes_per_s: 1_000_000,
            mtbf_s: None,
            restart_s: 60,
            variability_ppm: 0,
            simulated_plan,
        };
        let settings = Settings {
            strategy_selector: Some(guide),
            ..Settings::default()
        };
        Scheduler::with_strategy_selector(RunId(1), workflow, settings, &SizeReporter)
    }

    /// Ten pipelines of a short job and a long one, with eight of its like beside it.
    fn unlike() -> Scheduler {
        let mut text = String::new();
        for pipeline in 0..10 {
            text += &format!(
                "volume v{pipeline} scratch 1 MB\n\
                 job a{pipeline} {{\nexecutable = x\nruntime = 10 s\n}}\n\
                 mount v{pipeline} a{pipeline} /v\n"
            );
            for job in 0..9 {
                text += &format!(
                    "job b{pipeline}x{job} {{\nexecutable = x\nruntime = 1000 s\n}}\n\
                     parent a{pipeline} child b{pipeline}x{job}\n\
                     mount v{pipeline} b{pipeline}x{job} /v ro\n"
                );
            }
        }
        scheduler(&text)
    }

    #[test]
    fn begun_wide_pipeline_counts_as_one() {
        let mut scheduler = unlike();
        scheduler.state.graph.set_state(JobIndex(0), JobState::Done);
        let rest = View::new(&scheduler).rest();
        assert_eq!((rest.open, rest.fresh, rest.begun), (10, 9, 1));
    }

    #[test]
    fn plan_uses_only_the_quota_of_shared_nodes() {
        let mut scheduler = unlike();
        let space = Space {
            bytes: 1_000,
            files: 1_000,
        };
        let node = NodeInfo::single_group(ServerId(1), space, 4);
        let seen = Event::nodes_listed(vec![node]);
        scheduler.step(Time(0), seen, &mut Vec::new());
        assert_eq!(View::new(&scheduler).processors_and_bytes().0, 4);
        let limit = Limit {
            space,
            slots: 1,
            is_shared: true,
            is_over: false,
        };
        let set = |node: &mut FleetNode| node.limit = Some(limit);
        scheduler.state.fleet.update(ServerId(1), set);
        assert_eq!(View::new(&scheduler).processors_and_bytes().0, 1);
        let kinds = View::new(&scheduler).node_kinds();
        assert_eq!(kinds.iter().map(|kind| kind.slots).sum::<u32>(), 1);
    }

    #[test]
    fn few_new_measurements_do_not_trigger_replanning() {
        assert!(is_much_learned(0, 1, 10_000), "the first one");
        assert!(!is_much_learned(1_000, 1_001, 10_000));
        assert!(is_much_learned(1_000, 1_630, 10_000));
        assert!(is_much_learned(9_999, 10_000, 10_000), "the last one");
        assert!(is_much_learned(3, 4, 10), "of few each one");
        assert!(!is_much_learned(4, 4, 10));
    }

    /// What a selector is told of a volume of unknown size when a node is there, in bytes.
    fn told_of_unknown(simulated_plan: Option<SimulatedPlan>) -> u64 {
        let text = "volume v scratch unknown\njob a {\nexecutable = x\n}\nmount v a /v\n";
        let mut scheduler = scheduler_with(text, simulated_plan);
        let space = Space {
            bytes: 1_000_000,
            files: 1_000,
        };
        let node = NodeInfo::single_group(ServerId(1), space, 4);
        let seen = Event::nodes_listed(vec![node]);
        scheduler.step(Time(0), seen, &mut Vec::new());
        let change = scheduler.strategy_changes().first().expect("a selection");
        change.reason.parse().expect("a number")
    }

    #[test]
    fn undeclared_sizes_are_planned_as_simulated() {
        assert!(told_of_unknown(None) > 0, "made up");
        let plan = SimulatedPlan {
            strategy: Strategy::All,
            reason: String::new(),
            node_totals: vec![(4, 1_000_000)],
            corrections: BTreeMap::new(),
        };
        assert_eq!(
            told_of_unknown(Some(plan)),
            0,
            "empty, as in the simulation"
        );
    }

    #[test]
    fn run_without_a_selector_follows_no_strategy() {
        let mut scheduler = scheduler("job a {\nexecutable = x\n}\n");
        let (workflow, settings) = (scheduler.workflow().clone(), scheduler.settings().clone());
        let mut without = Scheduler::new(RunId(1), workflow, settings);
        for scheduler in [&mut scheduler, &mut without] {
            let space = Space {
                bytes: 1_000_000,
                files: 1_000,
            };
            let node = NodeInfo::single_group(ServerId(1), space, 4);
            let seen = Event::nodes_listed(vec![node]);
            scheduler.step(Time(0), seen, &mut Vec::new());
        }
        assert_eq!(scheduler.strategy_changes().len(), 1);
        assert!(without.strategy_changes().is_empty());
    }
}
