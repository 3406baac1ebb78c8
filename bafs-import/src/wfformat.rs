//! WfFormat, the JSON of WfCommons: tasks and files with sizes and run times from traces.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::sources::ImportError;
use crate::task_graph::{FileUse, Task, TaskCommand, TaskGraph};
use crate::words::normalise_path;

/// An exabyte: larger sizes are faults of the trace.
const FILE_BYTES_MAX: f64 = 1e18;

/// Versions whose layout this is. Earlier ones keep files and run times elsewhere.
const VERSIONS: [&str; 2] = ["1.5", "1.6"];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Instance {
    schema_version: String,
    workflow: WorkflowPart,
}

#[derive(Deserialize)]
struct WorkflowPart {
    specification: Specification,
    execution: Option<Execution>,
}

#[derive(Deserialize)]
struct Specification {
    tasks: Vec<SpecifiedTask>,
    #[serde(default)]
    files: Vec<SpecifiedFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecifiedTask {
    id: String,
    #[serde(default)]
    parents: Vec<String>,
    #[serde(default)]
    children: Vec<String>,
    #[serde(default)]
    input_files: Vec<String>,
    #[serde(default)]
    output_files: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecifiedFile {
    id: String,
    size_in_bytes: f64,
}

#[derive(Deserialize)]
struct Execution {
    #[serde(default)]
    tasks: Vec<ExecutedTask>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecutedTask {
    id: String,
    runtime_in_seconds: f64,
    #[serde(default)]
    core_count: Option<f64>,
    #[serde(default)]
    command: Option<CommandPart>,
}

#[derive(Deserialize)]
struct CommandPart {
    #[serde(default)]
    program: Option<String>,
    #[serde(default)]
    arguments: Vec<String>,
}

/// Reads an instance of WfFormat 1.5 or 1.6.
///
/// # Errors
/// JSON of another form or version, unknown ids, a cycle, or a file with several writers.
pub fn read_wfformat(text: &str) -> Result<TaskGraph, ImportError> {
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|error| ImportError::new(error.to_string()))?;
    let version = value["schemaVersion"].as_str().unwrap_or("none");
    if !VERSIONS.contains(&version) {
        return Err(ImportError::new(format!(
            "schema version {version} is not supported; convert the file to {} with wfcommons",
            VERSIONS[0]
        )));
    }
    let instance: Instance =
        serde_json::from_value(value).map_err(|error| ImportError::new(error.to_string()))?;
    debug_assert!(VERSIONS.contains(&&*instance.schema_version));
    build_graph(instance.workflow)
}

fn build_graph(workflow: WorkflowPart) -> Result<TaskGraph, ImportError> {
    let mut graph = TaskGraph::default();
    let specified = workflow.specification;
    let mut sizes = BTreeMap::new();
    for file in &specified.files {
        if file.size_in_bytes > FILE_BYTES_MAX {
            let (id, bytes) = (&file.id, file.size_in_bytes);
            return Err(ImportError::new(format!(
                "'{id}' has {bytes} bytes: no file is so large"
            )));
        }
        sizes.insert(file.id.as_str(), file.size_in_bytes.max(0.0) as u64);
    }
    let executed = workflow.execution.map_or_else(Vec::new, |it| it.tasks);
    let executed: BTreeMap<_, _> = executed.iter().map(|it| (it.id.as_str(), it)).collect();
    let ids = specified.tasks.iter().enumerate();
    let ids: BTreeMap<&str, usize> = ids.map(|(at, task)| (task.id.as_str(), at)).collect();
    if ids.len() < specified.tasks.len() {
        return Err(ImportError::new("several tasks have the same id"));
    }
    let mut names = BTreeMap::new();
    let mut unknown_runtimes = 0;
    for task in &specified.tasks {
        let ran = executed.get(task.id.as_str()).copied();
        unknown_runtimes += usize::from(ran.is_none());
        let mut imported = Task::new(&*task.id, command_of(ran));
        imported.runtime_s = ran.map(|it| it.runtime_in_seconds.max(0.0));
        imported.cpus = ran
            .and_then(|it| it.core_count)
            .map(|cores| cores.ceil().max(1.0) as u32);
        imported.inputs = list_uses(&mut graph, &task.input_files, &sizes, &mut names)?;
        imported.outputs = list_uses(&mut graph, &task.output_files, &sizes, &mut names)?;
        graph.tasks.push(imported);
    }
    let index_of = |id: &str| {
        let unknown = || ImportError::new(format!("no task has the id '{id}'"));
        ids.get(id).copied().ok_or_else(unknown)
    };
    for (at, task) in specified.tasks.iter().enumerate() {
        for parent in &task.parents {
            graph.tasks[at].parents.insert(index_of(parent)?);
        }
        for child in &task.children {
            graph.tasks[index_of(child)?].parents.insert(at);
        }
    }
    if unknown_runtimes > 0 {
        graph.remarks.push(format!(
            "{unknown_runtimes} tasks have no run time in the trace"
        ));
    }
    graph.complete()?;
    Ok(graph)
}

/// A program alone, without arguments, is a name of the trace rather than a command.
fn command_of(ran: Option<&ExecutedTask>) -> TaskCommand {
    let command = ran.and_then(|it| it.command.as_ref());
    match command.map(|it| (it.program.clone(), &it.arguments)) {
        Some((Some(program), arguments)) if !arguments.is_empty() => TaskCommand::Words(
            std::iter::once(program)
                .chain(arguments.iter().cloned())
                .collect(),
        ),
        _ => TaskCommand::Unknown,
    }
}

/// `names` has the id of each file by its path: an absolute path becomes a relative one.
fn list_uses<'i>(
    graph: &mut TaskGraph,
    ids: &'i [String],
    sizes: &BTreeMap<&str, u64>,
    names: &mut BTreeMap<String, &'i str>,
) -> Result<Vec<FileUse>, ImportError> {
    let mut uses: Vec<FileUse> = Vec::new();
    for id in ids {
        let path = normalise_path(id).map(|path| path.trim_start_matches('/').to_owned());
        let path = path.ok_or_else(|| ImportError::new(format!("'{id}' is no file name")))?;
        let first = *names.entry(path.clone()).or_insert(id);
        if first != id {
            return Err(ImportError::new(format!(
                "the files '{first}' and '{id}' would be one, '{path}'; rename one of them"
            )));
        }
        let file = graph.file(&path);
        graph.files[file].size_bytes = sizes.get(id.as_str()).copied();
        if uses.iter().all(|it| it.file != file) {
            uses.push(FileUse::new(file, &path)?);
        }
    }
    Ok(uses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task_graph::FileRole;

    const INSTANCE: &str = r#"{"schemaVersion": "1.5", "workflow": {"specification": {
        "tasks": [
            {"id": "split", "name": "s", "parents": [], "children": ["a", "b"],
             "inputFiles": ["db", "all.fa"], "outputFiles": ["1.fa", "2.fa"]},
            {"id": "a", "name": "s", "parents": ["split"], "children": [],
             "inputFiles": ["db", "1.fa"], "outputFiles": ["1.out"]},
            {"id": "b", "name": "s", "parents": ["split"], "children": [],
             "inputFiles": ["db", "2.fa"], "outputFiles": ["2.out"]}],
        "files": [{"id": "db", "sizeInBytes": 1000}, {"id": "all.fa", "sizeInBytes": 20},
            {"id": "1.fa", "sizeInBytes": 10}, {"id": "2.fa", "sizeInBytes": 10},
            {"id": "1.out", "sizeInBytes": 5}, {"id": "2.out", "sizeInBytes": 5}]},
        "execution": {"makespanInSeconds": 9, "executedAt": "x", "tasks": [
            {"id": "split", "runtimeInSeconds": 0.5, "coreCount": 1.0,
             "command": {"program": "split", "arguments": ["-n", "2"]}},
            {"id": "a", "runtimeInSeconds": 4}]}}}"#;

    #[test]
    fn roles_follow_from_file_use() {
        let graph = read_wfformat(INSTANCE).expect("an instance");
        let totals = graph.total_roles();
        let totals: Vec<_> = totals
            .iter()
            .map(|it| (it.role, it.files, it.bytes))
            .collect();
        let expected = [
            (FileRole::Batch, 1, 1000),
            (FileRole::Pipeline, 2, 20),
            (FileRole::Endpoint, 3, 30),
        ];
        assert_eq!(totals, expected);
        assert_eq!(graph.tasks[0].runtime_s, Some(0.5));
        assert_eq!(graph.remarks, ["1 tasks have no run time in the trace"]);
    }

    #[test]
    fn ambiguous_instances_are_refused() {
        for (from, to, expected) in [
            (
                "\"id\": \"b\"",
                "\"id\": \"a\"",
                "several tasks have the same id",
            ),
            (
                "[\"db\", \"2.fa\"]",
                "[\"/db\", \"2.fa\"]",
                "'db' and '/db' would be one",
            ),
            (
                "\"sizeInBytes\": 1000",
                "\"sizeInBytes\": 1e300",
                "no file is so large",
            ),
        ] {
            let text = INSTANCE.replacen(from, to, 1);
            assert_ne!(text, INSTANCE);
            let said = read_wfformat(&text).expect_err(expected);
            assert!(said.message.contains(expected), "{said}");
        }
    }

    #[test]
    fn other_versions_are_refused() {
        let said = read_wfformat(&INSTANCE.replace("1.5", "1.3")).expect_err("another version");
        assert!(said.message.contains("schema version 1.3"), "{said}");
        let cycle = INSTANCE.replace(
            r#""parents": [], "children""#,
            r#""parents": ["a"], "children""#,
        );
        assert!(
            read_wfformat(&cycle)
                .expect_err("a cycle")
                .message
                .contains("cycle")
        );
    }
}
