//! DAGMan: a `.dag` file and the submit files that it names.

use std::collections::{BTreeMap, BTreeSet};

use crate::dag_file::{Dag, Node, parse_dag};
use crate::sources::{ImportError, Sources};
use crate::submit_file::Submission;
use crate::task_graph::{FileUse, Task, TaskCommand, TaskGraph};
use crate::words::{base_name, normalise_path, parse_size};

/// Files that a remark names; it counts the others.
const EXAMPLES_MAX: usize = 5;

/// Reads a DAG and its submit files.
///
/// # Errors
/// A statement that BAFS cannot run (SPLICE, SUBDAG, FINAL, ...), an unknown node, a submit file
/// that cannot be read, or files whose writer cannot be known.
pub fn read_dagman(text: &str, sources: &dyn Sources) -> Result<TaskGraph, ImportError> {
    let dag = parse_dag(text)?;
    let mut graph = TaskGraph::default();
    graph.remarks.clone_from(&dag.remarks);
    let mut undeclared = BTreeMap::new();
    let (mut unknown_keys, mut unset_macros) = (BTreeSet::new(), BTreeSet::new());
    for (index, node) in dag.nodes.iter().enumerate() {
        let name = &dag.names[index];
        let mut task = match node.is_empty {
            true => Task::new(&**name, TaskCommand::Words(vec!["true".to_owned()])),
            false => {
                let submission = read_submission(&dag, index, sources)?;
                unknown_keys.extend(submission.unknown_keys.iter().cloned());
                unset_macros.extend(submission.unset_macros.iter().cloned());
                if !submission.has("transfer_output_files") {
                    undeclared.insert(index, initial_directory(node, &submission));
                }
                build_task(&mut graph, name, node, &submission)
                    .map_err(|error| ImportError::at(node.line, error.message))?
            }
        };
        task.parents.clone_from(&node.parents);
        task.retries = task.retries.max(node.retries);
        task.priority = node.priority;
        graph.tasks.push(task);
    }
    if !unknown_keys.is_empty() {
        let keys: Vec<_> = unknown_keys.into_iter().collect();
        let remark = format!(
            "keys of submit files without an effect: {}",
            keys.join(", ")
        );
        graph.remarks.push(remark);
    }
    if !unset_macros.is_empty() {
        let names: Vec<_> = unset_macros.into_iter().collect();
        graph.remarks.push(format!(
            "macros without a value, which become nothing: {}",
            names.join(", ")
        ));
    }
    infer_outputs(&mut graph, &undeclared, sources)?;
    for file in &mut graph.files {
        file.size_bytes = sources.size(&file.path);
        file.is_directory = sources.is_directory(&file.path);
    }
    graph.complete()?;
    // Nobody has measured what a task writes.
    for file in graph
        .files
        .iter_mut()
        .filter(|file| file.producer.is_some())
    {
        file.size_bytes = None;
        file.is_directory = false;
    }
    Ok(graph)
}

fn read_submission(
    dag: &Dag,
    index: usize,
    sources: &dyn Sources,
) -> Result<Submission, ImportError> {
    let node = &dag.nodes[index];
    let described = node
        .inline
        .as_ref()
        .or_else(|| dag.descriptions.get(&node.submit));
    let path = join_paths(&node.directory, &node.submit);
    let text = match described {
        Some(text) => text.clone(),
        None => sources.read(&path).map_err(|why| {
            ImportError::at(
                node.line,
                format!("cannot read the submit file {path}: {why}"),
            )
        })?,
    };
    let mut variables = node.variables.clone();
    let name = &dag.names[index];
    variables.extend([("JOB", &**name), ("RETRY", "0")].map(|(k, v)| (k.to_owned(), v.to_owned())));
    Submission::parse(&text, &variables).map_err(|error| {
        let place = error
            .line
            .map_or_else(String::new, |line| format!(":{line}"));
        ImportError::at(node.line, format!("{path}{place}: {}", error.message))
    })
}

/// Where a job takes its inputs from, and where it leaves its outputs.
fn initial_directory(node: &Node, submission: &Submission) -> String {
    let initial = submission
        .get("initialdir")
        .or_else(|| submission.get("initial_dir"));
    join_paths(&node.directory, initial.unwrap_or_default())
}

fn build_task(
    graph: &mut TaskGraph,
    name: &str,
    node: &Node,
    submission: &Submission,
) -> Result<Task, ImportError> {
    let universe = submission
        .get("universe")
        .unwrap_or("vanilla")
        .to_ascii_lowercase();
    if !["vanilla", "local", "5", "12"].contains(&&*universe) {
        return Err(ImportError::new(format!(
            "universe {universe} is not supported"
        )));
    }
    let directory = initial_directory(node, submission);
    let executable = submission.get("executable");
    let executable = executable.ok_or_else(|| ImportError::new("no executable"))?;
    let mut task = Task::new(name, TaskCommand::Unknown);
    let is_of_node = executable.starts_with('/')
        || submission
            .get("transfer_executable")
            .is_some_and(|value| value.eq_ignore_ascii_case("false"));
    let program = match is_of_node {
        true => executable.to_owned(),
        false => {
            let path = join_paths(&node.directory, executable);
            add_input(graph, &mut task, &path, base_name(executable))?;
            format!("./{}", base_name(executable))
        }
    };
    let mut words = vec![program];
    words.extend(submission.arguments()?);
    task.command = TaskCommand::Words(words);
    task.environment = submission.environment()?;
    for path in submission.list("transfer_input_files") {
        add_input(
            graph,
            &mut task,
            &join_paths(&directory, path),
            base_name(path),
        )?;
    }
    if let Some(input) = submission.get("input").filter(|path| *path != "/dev/null") {
        add_input(
            graph,
            &mut task,
            &join_paths(&directory, input),
            base_name(input),
        )?;
        read_standard_input(&mut task, base_name(input));
    }
    let remaps = submission.remaps();
    for path in submission.list("transfer_output_files") {
        let name = base_name(path);
        let target = remaps.get(name).map_or(name, String::as_str);
        add_output(graph, &mut task, &join_paths(&directory, target), path)?;
    }
    for (at, key) in ["output", "error"].into_iter().enumerate() {
        let Some(path) = submission.get(key).filter(|path| *path != "/dev/null") else {
            continue;
        };
        let local = base_name(path).to_owned();
        add_output(graph, &mut task, &join_paths(&directory, path), &local)?;
        task.streams[at] = Some(local);
    }
    read_resources(&mut task, submission);
    Ok(task)
}

/// Processors, memory, disk space and retries.
fn read_resources(task: &mut Task, submission: &Submission) {
    let cpus = submission
        .get("request_cpus")
        .and_then(|text| text.parse().ok());
    task.cpus = cpus;
    let size = |key, unit| submission.get(key).and_then(|text| parse_size(text, unit));
    task.memory_bytes = size("request_memory", 1 << 20);
    task.disk_bytes = size("request_disk", 1 << 10);
    let retries = submission
        .get("max_retries")
        .and_then(|text| text.parse().ok());
    task.retries = retries.unwrap_or(0);
}

/// Standard input of a job is empty in BAFS: a shell redirects it.
fn read_standard_input(task: &mut Task, local: &str) {
    if let TaskCommand::Words(words) = &task.command {
        let words: Vec<_> = words
            .iter()
            .map(|word| crate::words::quote_shell(word))
            .collect();
        let input = crate::words::quote_shell(local);
        task.command = TaskCommand::Shell(format!("{} < {input}", words.join(" ")));
    }
}

fn add_input(
    graph: &mut TaskGraph,
    task: &mut Task,
    path: &str,
    local: &str,
) -> Result<(), ImportError> {
    if path.ends_with('/') {
        return Err(ImportError::new(format!(
            "'{path}' transfers the files of a directory one by one; name the directory without '/'"
        )));
    }
    let file = graph.file(&checked_path(path)?);
    if task.inputs.iter().all(|it| it.file != file) {
        task.inputs.push(FileUse::new(file, local)?);
    }
    Ok(())
}

fn add_output(
    graph: &mut TaskGraph,
    task: &mut Task,
    path: &str,
    local: &str,
) -> Result<(), ImportError> {
    let file = graph.file(&checked_path(path)?);
    if task.outputs.iter().all(|it| it.file != file) {
        task.outputs.push(FileUse::new(file, local)?);
    }
    Ok(())
}

fn checked_path(path: &str) -> Result<String, ImportError> {
    if path.contains("://") {
        return Ok(path.to_owned());
    }
    let outside = || {
        ImportError::new(format!(
            "'{path}' is above the directory of the DAG; move the DAG there"
        ))
    };
    normalise_path(path).ok_or_else(outside)
}

fn join_paths(directory: &str, path: &str) -> String {
    match directory.is_empty() || path.starts_with('/') || path.contains("://") {
        true => path.to_owned(),
        false if path.is_empty() => directory.to_owned(),
        false => format!("{directory}/{path}"),
    }
}

/// HTCondor brings back all new files of a job that declares none, into its initial directory. So
/// a file of that directory which is not there, and that a task reads, is from the only ancestor
/// that declares no outputs. If it is there, it may be left from an earlier run.
fn infer_outputs(
    graph: &mut TaskGraph,
    undeclared: &BTreeMap<usize, String>,
    sources: &dyn Sources,
) -> Result<(), ImportError> {
    let written: BTreeSet<_> = graph
        .tasks
        .iter()
        .flat_map(|it| &it.outputs)
        .map(|it| it.file)
        .collect();
    let mut inferred: BTreeMap<usize, usize> = BTreeMap::new();
    let mut ancestors = AncestorLists::default();
    for (index, task) in graph.tasks.iter().enumerate() {
        for input in &task.inputs {
            let path = &graph.files[input.file].path;
            let is_known = written.contains(&input.file) || inferred.contains_key(&input.file);
            if is_known || path.contains("://") {
                continue;
            }
            let may_write = |writer: &usize| {
                let directory = undeclared.get(writer).map(|it| normalise_path(it));
                directory.is_some_and(|it| it.unwrap_or_default() == parent_path(path))
                    && graph.tasks[*writer]
                        .inputs
                        .iter()
                        .all(|it| it.file != input.file)
            };
            let direct: Vec<_> = task.parents.iter().copied().filter(may_write).collect();
            let writers = match direct.as_slice() {
                [_] => direct,
                _ => ancestors.of(graph, index).filter(may_write).collect(),
            };
            let is_there = sources.size(path).is_some();
            match writers.as_slice() {
                [] if is_there => {}
                [only] if !is_there => {
                    inferred.insert(input.file, *only);
                }
                [first, ..] if is_there => {
                    return Err(ImportError::new(format!(
                        "'{path}', which '{}' reads, is there, but '{}' may write it: that job \
                         declares no outputs; add transfer_output_files to its submit file, \
                         without names if it has none, or remove '{path}'",
                        task.name, graph.tasks[*first].name
                    )));
                }
                _ => {
                    return Err(ImportError::new(format!(
                        "'{path}', which '{}' reads, is not there, and no job declares to write \
                         it; add it to transfer_output_files of the job that does",
                        task.name
                    )));
                }
            }
        }
    }
    declare_outputs(graph, &inferred)
}

/// Declares the files that were found to be outputs, with one remark for all.
fn declare_outputs(
    graph: &mut TaskGraph,
    inferred: &BTreeMap<usize, usize>,
) -> Result<(), ImportError> {
    let mut examples = Vec::new();
    for (&file, &writer) in inferred {
        let path = graph.files[file].path.clone();
        let task = &mut graph.tasks[writer];
        task.outputs.push(FileUse::new(file, base_name(&path))?);
        if examples.len() < EXAMPLES_MAX {
            examples.push(format!("'{path}' of '{}'", task.name));
        }
    }
    let more = match inferred.len() - examples.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    if !examples.is_empty() {
        graph.remarks.push(format!(
            "count as outputs of jobs that declare none: {}{more}",
            examples.join(", ")
        ));
    }
    Ok(())
}

/// The directory of a path; empty for a path without one.
fn parent_path(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// The ancestors of the task that was asked for last.
#[derive(Debug, Default)]
struct AncestorLists {
    last: Option<(usize, BTreeSet<usize>)>,
}

impl AncestorLists {
    fn of(&mut self, graph: &TaskGraph, task: usize) -> impl Iterator<Item = usize> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != task) {
            self.last = Some((task, list_ancestors(graph, task)));
        }
        let found = self.last.iter().flat_map(|(_, found)| found);
        found.copied()
    }
}

fn list_ancestors(graph: &TaskGraph, task: usize) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut left: Vec<_> = graph.tasks[task].parents.iter().copied().collect();
    while let Some(next) = left.pop() {
        if found.insert(next) {
            // Parents may be declared further down.
            left.extend(
                graph
                    .tasks
                    .get(next)
                    .into_iter()
                    .flat_map(|it| it.parents.iter().copied()),
            );
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task_graph::FileRole;

    /// Files by their text.
    struct TestFiles(&'static [(&'static str, &'static str)]);

    impl Sources for TestFiles {
        fn read(&self, path: &str) -> Result<String, String> {
            let found = self.0.iter().find(|(name, _)| *name == path);
            found
                .map(|(_, text)| (*text).to_owned())
                .ok_or_else(|| "not there".to_owned())
        }

        fn size(&self, path: &str) -> Option<u64> {
            let found = self.0.iter().find(|(name, _)| *name == path);
            found.map(|(_, text)| text.len() as u64)
        }

        fn is_directory(&self, _path: &str) -> bool {
            false
        }
    }

    const FILES: TestFiles = TestFiles(&[
        (
            "prep.sub",
            "executable = prep.sh\ntransfer_input_files = data/all.txt\n\
             arguments = \"-n 2\"\nqueue\n",
        ),
        (
            "work.sub",
            "executable = /bin/sort\narguments = -o $(part).out $(part).txt\n\
                      transfer_input_files = $(part).txt, data/shared.db\n\
                      transfer_output_files = $(part).out\nrequest_memory = 512\nqueue\n",
        ),
        (
            "read.sub",
            "executable = /bin/cat\ntransfer_input_files = left.txt\nqueue\n",
        ),
        ("left.txt", "of an earlier run"),
        ("prep.sh", "#!/bin/sh\n"),
        ("data/all.txt", "12345"),
        ("data/shared.db", "1234567"),
    ]);

    const DAG: &str = "# a comment\nJOB prep prep.sub\nJob A work.sub\nJOB B work.sub\n\
                       VARS A part=\"a\"\nVars B part=\"b\"\nPARENT prep CHILD A B\nRETRY A 3\n\
                       SCRIPT POST B check.sh\nMAXJOBS x 2\n";

    #[test]
    fn submit_files_become_tasks() {
        let graph = read_dagman(DAG, &FILES).expect("a graph");
        let task = &graph.tasks[1];
        let words = ["/bin/sort", "-o", "a.out", "a.txt"].map(str::to_owned);
        assert_eq!(task.command, TaskCommand::Words(words.to_vec()));
        assert_eq!((task.retries, task.memory_bytes), (3, Some(512 << 20)));
        let roles: Vec<_> = graph
            .total_roles()
            .iter()
            .map(|it| (it.role, it.files))
            .collect();
        let expected = [
            (FileRole::Batch, 1),
            (FileRole::Pipeline, 2),
            (FileRole::Endpoint, 4),
        ];
        assert_eq!(roles, expected);
        let said = graph.remarks.join("\n");
        assert!(
            said.contains("SCRIPT POST B check.sh' does not run"),
            "{said}"
        );
        assert!(
            said.contains("jobs that declare none: 'a.txt' of 'prep', 'b.txt' of 'prep'"),
            "{said}"
        );
    }

    #[test]
    fn statements_without_a_meaning_are_refused() {
        for (text, expected) in [
            ("SPLICE a b.dag", "SPLICE is not supported"),
            ("SUBDAG EXTERNAL a b.dag", "SUBDAG is not supported"),
            ("FINAL a work.sub", "runs after a failure"),
            ("FROB a", "unknown statement"),
            ("PARENT a CHILD b", "unknown job 'b'"),
            ("JOB a none.sub", "cannot read the submit file none.sub"),
            (
                "SUBMIT-DESCRIPTION a {\nexecutable = x\n",
                "no line with '}' ends it",
            ),
            (
                "JOB p prep.sub\nJOB r read.sub\nPARENT p CHILD r",
                "'left.txt', which 'r' reads, is there, but 'p' may write it",
            ),
            (
                "JOB A work.sub\nVARS A part=\"a\"",
                "'a.txt', which 'A' reads, is not there",
            ),
        ] {
            let said = read_dagman(text, &FILES).expect_err(text).to_string();
            assert!(said.contains(expected), "{said}");
        }
    }
}
