//! The policies of the scheduler: how many there are, and whether they keep to themselves.
//!
//! A family is a folder of `bafs-sched/src/policy`. `registry.rs` there lists the policies, each as
//! a `PolicyEntry { … }`. Before that folder exists, all figures are zero.

use std::collections::BTreeSet;

use super::CrateMeasure;
use crate::tidy::files::SourceFile;
use crate::tidy::source;

const POLICY_FOLDER: &str = "bafs-sched/src/policy/";

/// What a policy would have to hold to write state.
const WRITABLE_STATE: [&str; 2] = ["&mut Scheduler", "&mut State"];

/// The figures of policies.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PolicyFigures {
    pub(super) families: usize,
    pub(super) implementations: usize,
    /// Imports of one family from another, and lines of policies that hold writable state.
    pub(super) violations: usize,
}

/// Measures the policies of `bafs-sched`.
pub(super) fn measure_policies(files: &[SourceFile], crates: &[CrateMeasure]) -> PolicyFigures {
    let policies = || files.iter().filter(|file| family_of(&file.path).is_some());
    let families: BTreeSet<&str> = policies()
        .filter_map(|file| family_of(&file.path))
        .collect();
    let registry = format!("{POLICY_FOLDER}registry.rs");
    let registry = files.iter().find(|file| file.path == registry);
    let imports = crates.iter().flat_map(|it| &it.imports);
    let crossing = imports.filter(|(from, to)| match (family_of(from), family_of(to)) {
        (Some(from), Some(to)) => from != to,
        _ => false,
    });
    let writers = policies().map(|file| {
        let code = source::blank_non_code(source::strip_tests(&file.text));
        let writes = |line: &&str| {
            WRITABLE_STATE
                .iter()
                .any(|state| source::has_word(line, state))
        };
        code.lines().filter(writes).count()
    });
    PolicyFigures {
        families: families.len(),
        implementations: registry.map_or(0, |file| {
            source::blank_non_code(source::strip_tests(&file.text))
                .matches("PolicyEntry {")
                .count()
        }),
        violations: crossing.count() + writers.sum::<usize>(),
    }
}

/// The folder of a policy's file.
fn family_of(path: &str) -> Option<&str> {
    let (family, _) = path.strip_prefix(POLICY_FOLDER)?.split_once('/')?;
    Some(family)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::house::measure_crates;
    use crate::house::tests::source_files;

    fn measure(order: &str) -> PolicyFigures {
        let registry =
            "static ALL: [PolicyEntry; 2] = [PolicyEntry { name: 1 }, PolicyEntry { }];\n";
        let files = source_files(&[
            ("bafs-sched/Cargo.toml", ""),
            ("bafs-sched/src/lib.rs", "mod policy;\n"),
            (
                "bafs-sched/src/policy/mod.rs",
                "mod order;\nmod placement;\nmod registry;\n",
            ),
            ("bafs-sched/src/policy/registry.rs", registry),
            ("bafs-sched/src/policy/order/mod.rs", order),
            (
                "bafs-sched/src/policy/placement/mod.rs",
                "pub struct Capacity;\n",
            ),
        ]);
        measure_policies(&files, &measure_crates(&files))
    }

    #[test]
    fn families_and_policies_are_counted() {
        let found = measure("fn decide(view: &View) {}\n");
        let expected = PolicyFigures {
            families: 2,
            implementations: 2,
            violations: 0,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn policies_that_write_or_cross_are_counted() {
        assert_eq!(measure("fn f(_: &mut State) {}\n").violations, 1);
        assert_eq!(
            measure("use crate::policy::placement::Capacity;\n").violations,
            1
        );
    }
}
