//! Whether a run may begin: it waits for nodes on which the workflow fits.

use crate::policy::View;

impl View<'_> {
    /// Why running jobs cannot begin on the nodes that are there, in a sentence; nothing when it
    /// can.
    pub(crate) fn why_not_begin(&self) -> Option<String> {
        match self.has_workers() {
            true => self.misfit(),
            false => Some(no_node()),
        }
    }
}

pub(crate) fn no_node() -> String {
    "the catalog lists no node; start nodes (`bafs node`), and check the catalog's address"
        .to_owned()
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{RunId, ServerId};
    use bafs_proto::time::Time;
    use bafs_workflow::parse_workflow;

    use crate::Scheduler;
    use crate::{Action, Event, NodeInfo, Outcome, Settings, Space};

    /// A job that needs what two nodes have together, and a run with so much patience.
    fn scheduler(settle_ms: u64) -> Scheduler {
        let text = "volume db cache bafs://home/db 1500 MB\n\
                    job a {\nexecutable = x\n}\nmount db a /db";
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).unwrap().workflow;
        let settings = Settings {
            fleet_settle_ms: settle_ms,
            nodes_timeout_ms: 60_000,
            ..Settings::default()
        };
        Scheduler::new(RunId(1), workflow, settings)
    }

    fn comes(scheduler: &mut Scheduler, at_ms: u64, node: u64) -> Vec<Action> {
        let space = Space {
            bytes: 1_000_000_000,
            files: 100_000,
        };
        let seen = Event::nodes_listed(vec![NodeInfo::single_group(ServerId(node), space, 1)]);
        let mut actions = Vec::new();
        scheduler.step(Time(at_ms), seen, &mut actions);
        actions
    }

    #[test]
    fn waiting_time_restarts_when_the_first_node_comes() {
        let mut scheduler = scheduler(5_000);
        scheduler.step(Time(0), Event::Tick, &mut Vec::new());
        comes(&mut scheduler, 58_000, 1);
        scheduler.step(Time(62_000), Event::Tick, &mut Vec::new());
        assert_eq!(scheduler.outcome(), None);
        assert!(!comes(&mut scheduler, 62_500, 2).is_empty());
        scheduler.step(Time(90_000), Event::Tick, &mut Vec::new());
        assert_eq!(scheduler.outcome(), None);
        assert!(scheduler.warnings().is_empty());
    }

    #[test]
    fn scheduler_warns_while_waiting_for_further_nodes() {
        let mut scheduler = scheduler(50_000);
        comes(&mut scheduler, 0, 1);
        let told = scheduler.warnings()[0].text.clone();
        assert!(
            told.contains("1.5 GB") && told.contains("up to 50 s"),
            "{told}"
        );
        scheduler.step(Time(50_000), Event::Tick, &mut Vec::new());
        assert!(matches!(scheduler.outcome(), Some(Outcome::Failed { .. })));
    }
}
