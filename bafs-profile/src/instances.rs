//! Traces as instances of one workload: each with its stages, in order.

use std::collections::BTreeMap;

use crate::trace::Trace;

/// One instance of a workload.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its stages, in order.
    pub stages: Vec<&'a Trace>,
}

/// Divides traces into instances, in the order of their first traces.
pub fn group_instances(traces: &[Trace]) -> Vec<Instance<'_>> {
    let mut positions: BTreeMap<&str, usize> = BTreeMap::new();
    let mut instances: Vec<Instance<'_>> = Vec::new();
    for trace in traces {
        let position = *positions.entry(&trace.instance).or_insert_with(|| {
            instances.push(Instance {
                name: &trace.instance,
                stages: Vec::new(),
            });
            instances.len() - 1
        });
        instances[position].stages.push(trace);
    }
    instances
}

/// Which traces read what each trace wrote: positions of the writer and the reader.
pub(crate) fn find_data_edges(traces: &[Trace]) -> Vec<(usize, usize)> {
    let mut last_writer: BTreeMap<&str, usize> = BTreeMap::new();
    let mut own_writer: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut edges = Vec::new();
    for (position, trace) in traces.iter().enumerate() {
        let (mut reads, mut writes) = (
            vec![false; trace.files.len()],
            vec![false; trace.files.len()],
        );
        for access in &trace.accesses {
            reads[access.file as usize] |= access.kind.is_read() && access.bytes > 0;
            writes[access.file as usize] |= access.kind.is_write();
        }
        for (number, file) in trace.files.iter().enumerate() {
            let path = file.path.as_str();
            if reads[number] && !file.is_created {
                let own = own_writer.get(&(trace.instance.as_str(), path));
                if let Some(writer) = own.or_else(|| last_writer.get(path)) {
                    edges.push((*writer, position));
                }
            }
        }
        for (number, file) in trace.files.iter().enumerate() {
            if writes[number] || file.is_created {
                last_writer.insert(&file.path, position);
                own_writer.insert((&trace.instance, &file.path), position);
            }
        }
    }
    edges.sort_unstable();
    edges.dedup();
    edges
}
