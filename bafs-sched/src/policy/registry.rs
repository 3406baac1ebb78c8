//! Which policies there are, and those that a run uses.

use serde::Serialize;

use super::Policy;
use super::admission::{ADMISSIONS, Admission};
use super::cache_space::{CachePartitioning, PARTITIONINGS};
use super::failure::{ATTRIBUTIONS, FailureAttribution};
use super::order::{ORDERS, ReadyOrder};
use super::placement::{PLACEMENTS, Placement};
use super::replication::{REPLICATIONS, Replication};
use super::strategy::{STRATEGY_CHANGES, StrategyChanges};
use crate::policy_names::{PolicyNames, PolicyPositions};
use crate::state::scheduler_state::State;

/// A policy, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PolicyDescription {
    /// Its family.
    pub family: &'static str,
    /// Its name in the family.
    pub name: &'static str,
    /// What it does, in one sentence.
    pub summary: &'static str,
    /// Whether a run uses it when the user names none of its family.
    pub is_default: bool,
}

/// All policies, by family in the order of their asking; the default of each family first.
#[must_use]
pub fn list_policies() -> Vec<PolicyDescription> {
    let mut all = Vec::new();
    describe("admission", ADMISSIONS, &mut all);
    describe("order", ORDERS, &mut all);
    describe("placement", PLACEMENTS, &mut all);
    describe("cache_space", PARTITIONINGS, &mut all);
    describe("replication", REPLICATIONS, &mut all);
    describe("failure", ATTRIBUTIONS, &mut all);
    describe("strategy", STRATEGY_CHANGES, &mut all);
    all
}

fn describe<P: Policy + ?Sized>(
    family: &'static str,
    policies: &[&'static P],
    all: &mut Vec<PolicyDescription>,
) {
    let described = policies
        .iter()
        .enumerate()
        .map(|(at, policy)| PolicyDescription {
            family,
            name: policy.name(),
            summary: policy.summary(),
            is_default: at == 0,
        });
    all.extend(described);
}

impl PolicyNames {
    /// Takes `family=name`.
    ///
    /// # Errors
    /// A sentence that names what there is, when no such policy exists.
    pub fn choose(&mut self, text: &str) -> Result<(), String> {
        let Some((family, name)) = text.split_once('=') else {
            return Err(format!(
                "'{text}' is not of the form family=name; see `bafs policies`"
            ));
        };
        let all = list_policies();
        if !all.iter().any(|policy| policy.family == family) {
            let mut families: Vec<&str> = all.iter().map(|policy| policy.family).collect();
            families.dedup();
            let families = families.join(", ");
            return Err(format!(
                "no family of policies is called '{family}'; there are {families}"
            ));
        }
        let of_family = all.iter().filter(|policy| policy.family == family);
        let names: Vec<&str> = of_family.map(|policy| policy.name).collect();
        if !names.contains(&name) {
            let names = names.join(", ");
            return Err(format!(
                "no {family} policy is called '{name}'; there are {names}"
            ));
        }
        self.set(family, name);
        Ok(())
    }

    /// The same with another policy.
    ///
    /// # Panics
    /// When there is no such policy: for names that the program itself gives.
    #[must_use]
    pub fn with(mut self, family: &str, name: &str) -> Self {
        let chosen = self.choose(&format!("{family}={name}"));
        assert_eq!(chosen, Ok(()), "the program names policies that exist");
        self
    }
}

impl PolicyPositions {
    /// Those that were named, else the first of each family. A journal may name one that this
    /// version does not have; the default takes its place.
    pub(crate) fn of(names: &PolicyNames) -> Self {
        Self([
            position(names, "admission", ADMISSIONS),
            position(names, "order", ORDERS),
            position(names, "placement", PLACEMENTS),
            position(names, "cache_space", PARTITIONINGS),
            position(names, "replication", REPLICATIONS),
            position(names, "failure", ATTRIBUTIONS),
            position(names, "strategy", STRATEGY_CHANGES),
        ])
    }
}

fn position<P: Policy + ?Sized>(names: &PolicyNames, family: &str, all: &[&'static P]) -> u8 {
    let is_named = |policy: &&P| names.get(family) == Some(policy.name());
    let found = all.iter().position(is_named);
    found.and_then(|at| u8::try_from(at).ok()).unwrap_or(0)
}

/// The policies of a run, one of each family.
#[derive(Clone, Copy)]
pub(crate) struct PolicySet {
    pub(crate) admission: &'static dyn Admission,
    pub(crate) order: &'static dyn ReadyOrder,
    pub(crate) placement: &'static dyn Placement,
    pub(crate) cache_space: &'static dyn CachePartitioning,
    pub(crate) replication: &'static dyn Replication,
    pub(crate) failure: &'static dyn FailureAttribution,
    pub(crate) strategy: &'static dyn StrategyChanges,
}

impl PolicySet {
    fn at(positions: PolicyPositions) -> Self {
        let [
            admission,
            order,
            placement,
            cache_space,
            replication,
            failure,
            strategy,
        ] = positions.0.map(usize::from);
        Self {
            admission: ADMISSIONS[admission],
            order: ORDERS[order],
            placement: PLACEMENTS[placement],
            cache_space: PARTITIONINGS[cache_space],
            replication: REPLICATIONS[replication],
            failure: ATTRIBUTIONS[failure],
            strategy: STRATEGY_CHANGES[strategy],
        }
    }
}

impl State {
    /// The policies that the settings name.
    pub(crate) fn policies(&self) -> PolicySet {
        PolicySet::at(self.policies)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn policy_names_are_unique_in_their_family() {
        let all = list_policies();
        let names: BTreeSet<(&str, &str)> = all.iter().map(|it| (it.family, it.name)).collect();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn each_open_family_has_an_alternative() {
        for family in [
            "order",
            "placement",
            "cache_space",
            "replication",
            "failure",
            "strategy",
        ] {
            let all = list_policies();
            assert!(
                all.iter().filter(|it| it.family == family).count() >= 2,
                "{family}"
            );
        }
    }

    #[test]
    fn unknown_policy_names_are_rejected_with_the_choices() {
        let mut names = PolicyNames::default();
        let error = names
            .choose("placement=nearest")
            .expect_err("there is none");
        assert!(error.contains("capacity"), "{error}");
        let error = names.choose("place=capacity").expect_err("there is none");
        assert!(error.contains("placement"), "{error}");
        let error = names.choose("placement").expect_err("a name is missing");
        assert!(error.contains("family=name"), "{error}");
    }

    #[test]
    fn named_policy_replaces_the_default() {
        let names = PolicyNames::default().with("order", "breadth-first");
        let policies = PolicySet::at(PolicyPositions::of(&names));
        assert_eq!(policies.order.name(), "breadth-first");
        assert_eq!(policies.placement.name(), "capacity");
    }
}
