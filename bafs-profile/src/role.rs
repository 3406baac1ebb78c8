//! The role of each file: endpoint, pipeline or batch data (Bent 2005, §2.2 and §2.4.4).

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::trace::Trace;

/// What a file is to a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A first input or a last output of one pipeline.
    Endpoint,
    /// Made by the workload, and read or removed by it.
    Pipeline,
    /// Read by several instances, and written by none.
    Batch,
}

impl Role {
    /// Every role, in the order of the tables.
    pub const ALL: [Self; 3] = [Self::Endpoint, Self::Pipeline, Self::Batch];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Endpoint => "endpoint",
            Self::Pipeline => "pipeline",
            Self::Batch => "batch",
        }
    }
}

/// What is known of one path in all traces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PathUse {
    pub(crate) readers: BTreeSet<String>,
    pub(crate) writers: BTreeSet<String>,
    /// The instances that changed what was there before them.
    pub(crate) modifiers: BTreeSet<String>,
    is_removed: bool,
    is_read_back: bool,
}

/// What became of each path, in the order of the traces.
pub(crate) fn collect_path_uses(traces: &[Trace]) -> BTreeMap<String, PathUse> {
    let mut uses: BTreeMap<String, PathUse> = BTreeMap::new();
    for trace in traces {
        let mut has_read = vec![false; trace.files.len()];
        let mut has_written = vec![false; trace.files.len()];
        for access in &trace.accesses {
            has_read[access.file as usize] |= access.kind.is_read() && access.bytes > 0;
            has_written[access.file as usize] |= access.kind.is_write();
        }
        for (number, file) in trace.files.iter().enumerate() {
            let known = uses.entry(file.path.clone()).or_default();
            let is_changed = has_written[number] || file.is_created;
            if has_read[number] {
                known.readers.insert(trace.instance.clone());
            }
            // A later stage, or another instance, reads what a workload made.
            let is_handed_on = has_read[number] && !file.is_created && !known.writers.is_empty();
            known.is_read_back |= is_handed_on || file.is_read_back;
            let is_own = file.is_created || known.writers.contains(&trace.instance);
            if is_changed {
                known.writers.insert(trace.instance.clone());
                if !is_own {
                    known.modifiers.insert(trace.instance.clone());
                }
            }
            known.is_removed = file.is_removed;
        }
    }
    uses
}

impl PathUse {
    /// The role that follows. With one instance, an input that others may share counts as endpoint.
    pub(crate) fn role(&self) -> Role {
        if self.writers.is_empty() {
            return match self.readers.len() {
                0 | 1 => Role::Endpoint,
                _ => Role::Batch,
            };
        }
        // An input that is updated in place is still the user's.
        if !self.modifiers.is_empty() {
            return Role::Endpoint;
        }
        match self.is_removed || self.is_read_back {
            true => Role::Pipeline,
            false => Role::Endpoint,
        }
    }
}

/// The role of each path that was used.
///
/// An untouched file that several instances only looked at is batch data of no bytes.
pub fn find_roles(traces: &[Trace]) -> BTreeMap<String, Role> {
    let mut lookers: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for trace in traces {
        for file in &trace.files {
            lookers
                .entry(&file.path)
                .or_default()
                .insert(&trace.instance);
        }
    }
    let results: BTreeSet<&String> = traces.iter().flat_map(|trace| &trace.results).collect();
    let uses = collect_path_uses(traces);
    let role = |path: &String, known: &PathUse| {
        if results.contains(path) {
            return Role::Endpoint;
        }
        let is_unread = known.readers.is_empty() && known.writers.is_empty();
        match is_unread && lookers[path.as_str()].len() > 1 {
            true => Role::Batch,
            false => known.role(),
        }
    };
    let roles = uses
        .iter()
        .map(|(path, known)| (path.clone(), role(path, known)));
    roles.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{AccessKind, FileTrace};
    use crate::trace_builder::{DataOperation, TraceBuilder};

    /// A stage that makes or reads files: `+path` makes it, `-path` reads and removes it.
    fn stage(instance: &str, files: &[&str]) -> Trace {
        let mut builder = TraceBuilder::default();
        for (number, word) in files.iter().enumerate() {
            let (is_made, is_removed) = (word.starts_with('+'), word.starts_with('-'));
            let path = word.trim_start_matches(['+', '-']);
            let handle = number as u64;
            builder.record_open(0, "p", (path, 10), handle, is_made);
            let kind = match is_made {
                true => AccessKind::Write,
                false => AccessKind::Read,
            };
            let operation = DataOperation {
                handle,
                kind,
                offset: 0,
                bytes: 10,
            };
            builder.record_data(0, operation);
            builder.forget_handle(handle);
            if is_removed {
                builder.record_removal(0, "p", path);
            }
        }
        Trace {
            instance: instance.to_owned(),
            ..builder.finish()
        }
    }

    fn check(traces: &[Trace], expected: &[(&str, Role)]) {
        let roles = find_roles(traces);
        let found: Vec<_> = roles
            .iter()
            .map(|(path, role)| (path.as_str(), *role))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn roles_follow_from_two_instances() {
        let traces = [
            stage("a", &["db", "a.fa", "+a.raw"]),
            stage("a", &["a.raw", "+a.txt"]),
            stage("b", &["db", "b.fa", "+b.raw"]),
            stage("b", &["-b.raw", "+b.txt"]),
        ];
        let expected = [
            ("a.fa", Role::Endpoint),
            ("a.raw", Role::Pipeline),
            ("a.txt", Role::Endpoint),
            ("b.fa", Role::Endpoint),
            ("b.raw", Role::Pipeline),
            ("b.txt", Role::Endpoint),
            ("db", Role::Batch),
        ];
        check(&traces, &expected);
    }

    #[test]
    fn one_path_of_several_instances_stays_private() {
        let traces = [
            stage("a", &["+tmp", "+out"]),
            stage("a", &["tmp"]),
            stage("b", &["+tmp", "+out"]),
            stage("b", &["tmp"]),
        ];
        check(&traces, &[("out", Role::Endpoint), ("tmp", Role::Pipeline)]);
    }

    #[test]
    fn files_that_join_pipelines_are_pipeline_data() {
        let traces = [
            stage("a", &["+a.hits"]),
            stage("b", &["+b.hits"]),
            stage("join", &["a.hits", "b.hits", "+all"]),
        ];
        let expected = [
            ("a.hits", Role::Pipeline),
            ("all", Role::Endpoint),
            ("b.hits", Role::Pipeline),
        ];
        check(&traces, &expected);
    }

    #[test]
    fn inputs_updated_in_place_stay_endpoints() {
        let mut trace = stage("a", &["state"]);
        let mut write = trace.accesses[1];
        write.kind = AccessKind::Write;
        trace.accesses.push(write);
        check(&[trace], &[("state", Role::Endpoint)]);
    }

    #[test]
    fn files_without_data_count_by_lookers() {
        let looked = |instance: &str| Trace {
            instance: instance.to_owned(),
            files: vec![FileTrace {
                path: "conf".to_owned(),
                ..FileTrace::default()
            }],
            ..Trace::default()
        };
        check(&[looked("a"), looked("b")], &[("conf", Role::Batch)]);
    }
}
