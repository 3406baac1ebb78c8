//! Blames a node only by evidence: it fails again and again while another node does not.

use bafs_proto::ids::ServerId;

use super::{FailureAttribution, Policy, View};
use crate::state::nodes::{Fleet, FleetNode};

/// Blames nodes by comparing them with others.
#[derive(Debug)]
pub(super) struct Evidence;

impl Policy for Evidence {
    fn name(&self) -> &'static str {
        "evidence"
    }

    fn summary(&self) -> &'static str {
        "a node is put into quarantine when jobs fail there again and again, but not elsewhere"
    }
}

impl FailureAttribution for Evidence {
    fn blames_for_faults(&self, view: View<'_>, server: ServerId) -> bool {
        has_faults_alone(&view.fleet, server, view.settings().node_faults_max)
    }

    fn blames_for_jobs(&self, view: View<'_>, server: ServerId) -> bool {
        fails_jobs_alone(&view.fleet, server, view.settings().node_faults_max)
    }

    fn avoids_failed_nodes(&self) -> bool {
        true
    }
}

/// Whether the environment failed so often in a row on a node while it works on another.
fn has_faults_alone(fleet: &Fleet, server: ServerId, faults_max: u32) -> bool {
    let node = fleet.get(server);
    let is_bad = node.is_some_and(|node| node.faults_in_row >= faults_max);
    // Where long jobs run, none may have ended yet.
    let is_witness =
        |node: &FleetNode| node.faults_in_row == 0 && (node.is_proven || node.busy > 0);
    is_bad && fleet.can_spare(server) && fleet.any_other(server, is_witness)
}

/// Whether so many jobs failed on a node that succeeded elsewhere, and none on another node.
fn fails_jobs_alone(fleet: &Fleet, server: ServerId, blamed_max: u32) -> bool {
    let node = fleet.get(server);
    let is_bad = node.is_some_and(|node| node.blamed >= blamed_max);
    let is_witness = |node: &FleetNode| node.blamed == 0 && node.is_proven;
    is_bad && fleet.can_spare(server) && fleet.any_other(server, is_witness)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NodeInfo, Space};

    fn node(id: u64, slots: u32, bytes: u64) -> NodeInfo {
        NodeInfo::single_group(ServerId(id), Space { bytes, files: 100 }, slots)
    }

    fn has_faults(fleet: &mut Fleet, server: u64, most: u32) -> bool {
        fleet.count_fault(ServerId(server));
        has_faults_alone(fleet, ServerId(server), most)
    }

    fn has_blame(fleet: &mut Fleet, server: u64, most: u32) -> bool {
        fleet.count_blame(ServerId(server));
        fails_jobs_alone(fleet, ServerId(server), most)
    }

    #[test]
    fn node_is_quarantined_only_if_others_succeed() {
        let mut fleet = Fleet::new(0);
        fleet.see(node(1, 1, 100));
        assert!(!has_faults(&mut fleet, 1, 1), "there is no other");
        fleet.see(node(2, 1, 100));
        assert!(!has_faults(&mut fleet, 1, 2), "the other ran nothing");
        fleet.update(ServerId(2), FleetNode::prove);
        assert!(has_faults(&mut fleet, 1, 2));
        assert!(!has_faults(&mut fleet, 2, 1), "the other fails too");
    }

    #[test]
    fn success_elsewhere_blames_a_node_without_successes() {
        let mut fleet = Fleet::new(0);
        for id in 1..=8 {
            fleet.see(node(id, 1, 100));
        }
        assert!(!has_blame(&mut fleet, 1, 1), "no other ran anything");
        fleet.update(ServerId(2), FleetNode::prove);
        assert!(has_blame(&mut fleet, 1, 2));
        fleet.update(ServerId(1), FleetNode::prove);
        assert!(!has_blame(&mut fleet, 1, 2), "a job succeeded there since");
    }

    #[test]
    fn at_most_a_quarter_of_slots_is_quarantined() {
        let mut fleet = Fleet::new(0);
        for id in 1..=8 {
            fleet.see(node(id, 1, 100));
        }
        fleet.update(ServerId(8), FleetNode::prove);
        for id in 1..=2 {
            assert!(has_blame(&mut fleet, id, 1));
            fleet.update(ServerId(id), |node| node.is_suspect = true);
        }
        assert!(!has_blame(&mut fleet, 3, 1), "that would be three of eight");
        fleet.update(ServerId(1), FleetNode::pardon);
        assert!(has_blame(&mut fleet, 3, 1));
    }
}
