//! Which strategy is followed: what is learned for the question, and the change to another one.
//! What is asked, and when, is `policy/strategy/selector.rs`.

use bafs_proto::ids::ServerId;
use bafs_proto::message::JobReport;
use bafs_workflow::JobIndex;

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::strategy::selector::NodeReview;
use crate::state::jobs::JobState;
use crate::state::limits::{AllocationRules, StrategyLimits};
use crate::state::scheduler_state::State;
use crate::state::strategy::StrategyChange;
use crate::strategy_selector::Selection;

impl State {
    /// The strategies that were followed, the first one first; none without a guide.
    pub fn strategy_changes(&self) -> &[StrategyChange] {
        self.guided.as_ref().map_or(&[], |guided| &guided.followed)
    }

    /// Asks the selector when something has changed that may matter to it.
    pub(crate) fn reconsider_strategy(&mut self) {
        let strategy = self.policies().strategy;
        let review = View::new(self).review_strategy(strategy);
        let seen = (self.fleet.alive, self.fleet.lost);
        if review.nodes != NodeReview::Unseen {
            self.forget_lost_nodes();
        }
        if let Some(guided) = &mut self.guided {
            guided.run_s = review.run_s.unwrap_or(guided.run_s);
            if let Some(asked) = &mut guided.asked {
                if review.run_s.is_some() {
                    asked.computed = guided.computing.jobs.max(asked.computed);
                }
                if let NodeReview::Similar(look_at) = review.nodes {
                    (asked.alive, asked.lost) = seen;
                    asked.look_at = look_at;
                }
            }
        }
        if review.is_due {
            self.ask_selector();
        }
    }

    /// Asks the selector, and follows what it says.
    fn ask_selector(&mut self) {
        self.forget_lost_nodes();
        let Some(answer) = View::new(self).ask_selector() else {
            return;
        };
        if let Some(guided) = &mut self.guided {
            guided.asked = Some(answer.inputs);
            if let Some(model) = answer.model {
                guided.model = model;
            }
        }
        if let Some(selection) = answer.selection {
            let Selection {
                strategy,
                reason,
                rules,
                has_simulated_rules,
            } = selection;
            self.commit(Decision::FollowStrategy {
                strategy,
                reason,
                rules,
                has_simulated_rules,
            });
        }
    }

    /// Forgets the nodes that will not come back any more, and those that did.
    fn forget_lost_nodes(&mut self) {
        let expected = View::new(self).nodes_expected_back();
        if let Some(guided) = &mut self.guided {
            let lost = &mut guided.lost_nodes.since;
            lost.retain(|server, _| expected.contains_key(server));
        }
    }

    /// Follows a strategy from now on.
    pub(super) fn follow_selection(&mut self, selection: Selection) {
        if let Some(guided) = &mut self.guided {
            let last = guided.followed.last();
            let is_new = last.map(|last| last.strategy) != Some(selection.strategy);
            guided.has_simulated_rules = selection.has_simulated_rules;
            if is_new {
                guided.followed.push(StrategyChange {
                    changed_at: self.now,
                    strategy: selection.strategy,
                    reason: selection.reason,
                });
            }
        }
        self.follow(selection.rules);
    }

    /// Takes other rules from now on. What has begun goes on.
    fn follow(&mut self, rules: Option<AllocationRules>) {
        if rules.as_ref() == self.limits.as_ref().map(|limits| &limits.rules) {
            return;
        }
        match (rules, &mut self.limits) {
            (Some(rules), Some(limits)) => limits.change(rules),
            (Some(rules), none) => {
                *none = Some(StrategyLimits::new(rules, &self.graph));
                self.begin_what_has_begun();
            }
            (None, limits) => *limits = None,
        }
        self.requeue_all();
        self.queues.wake_all();
    }

    fn begin_what_has_begun(&mut self) {
        for job in self.graph.job_indexes() {
            let pipeline = self.graph.pipeline(job);
            let has_begun = matches!(self.graph.state(job), JobState::Done | JobState::Active);
            if has_begun && !self.graph.is_pipeline_final(pipeline) {
                self.begin_pipeline(pipeline);
            }
        }
        for volume in self.graph.volume_indexes() {
            if self.volumes.is_live(volume) {
                self.note_batch(volume);
            }
        }
    }

    /// A job is done: takes note of what it computed.
    pub(crate) fn learn_computing(&mut self, job: JobIndex, report: &JobReport) {
        let declared_s = self.graph.workflow.job(job).runtime_s.unwrap_or(0);
        if let Some(guided) = &mut self.guided {
            guided.computing.learn(declared_s, report.compute_ms());
        }
    }

    /// A node was lost.
    pub(crate) fn note_lost_node(&mut self, server: ServerId) {
        if let Some(guided) = &mut self.guided {
            guided.lost_nodes.since.insert(server, self.now);
        }
    }
}
