//! The policies of the scheduler: how many there are, and whether they keep to themselves.
//!
//! A family is a folder of `bafs-sched/src/policy`; a policy implements `Policy` there. Rules of
//! the folder that still write the state themselves, as methods of `State` with `&mut self`, count
//! as violations.

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
    let imports = crates.iter().flat_map(|it| &it.imports);
    let crossing = imports.filter(|(from, to)| match (family_of(from), family_of(to)) {
        (Some(from), Some(to)) => from != to,
        _ => false,
    });
    let code = |file: &SourceFile| source::blank_non_code(source::strip_tests(&file.text));
    let writers = policies().map(|file| count_writers(&code(file)));
    let implementations = policies().map(|file| code(file).matches("impl Policy for").count());
    PolicyFigures {
        families: families.len(),
        implementations: implementations.sum(),
        violations: crossing.count() + writers.sum::<usize>(),
    }
}

/// Lines that take writable state: as an argument, or as a method of `State`.
fn count_writers(code: &str) -> usize {
    let mut is_in_state = false;
    let mut count = 0;
    for line in code.lines() {
        if line.starts_with("impl State") {
            is_in_state = true;
        } else if line.starts_with('}') {
            is_in_state = false;
        }
        let is_method = is_in_state && source::has_word(line, "&mut self");
        let is_argument = WRITABLE_STATE
            .iter()
            .any(|state| source::has_word(line, state));
        count += usize::from(is_method || is_argument);
    }
    count
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
        let files = source_files(&[
            ("bafs-sched/Cargo.toml", ""),
            ("bafs-sched/src/lib.rs", "mod policy;\n"),
            (
                "bafs-sched/src/policy/mod.rs",
                "mod order;\nmod placement;\n",
            ),
            ("bafs-sched/src/policy/order/mod.rs", order),
            (
                "bafs-sched/src/policy/placement/mod.rs",
                "pub struct Capacity;\nimpl Policy for Capacity {}\nimpl Policy for MostFree {}\n",
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
        let method =
            "impl State {\n    fn f(&mut self) {}\n}\nimpl Own {\n    fn g(&mut self) {}\n}\n";
        assert_eq!(measure(method).violations, 1);
        assert_eq!(
            measure("use crate::policy::placement::Capacity;\n").violations,
            1
        );
    }
}
