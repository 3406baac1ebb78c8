//! Writes a task graph as the text of a workflow, and its trace for the simulator.
//!
//! A task runs in a scratch volume of its own, at [`WORK`]. Its inputs are volumes below
//! [`INPUTS`], with links to them where the task expects its files. So a task sees the directory
//! that it would see in the system that it is from.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use bafs_workflow::format_workflow;

use crate::sources::ImportError;
use crate::task_graph::{FileRole, FileUse, Task, TaskCommand, TaskGraph, WorkflowFile};
use crate::words::{NameTable, base_name, quote_shell, quote_word};

/// Where a task runs and writes.
const WORK: &str = "/bafs/work";

/// Where its inputs are, each volume in a directory.
const INPUTS: &str = "/bafs/in";

/// Unit in which volumes count files.
const PAGE_BYTES: u64 = 4096;

/// Unit in which caches keep files.
const BLOCK_BYTES: u64 = 64 << 10;

/// Space of a scratch volume beyond its files: directories.
const DIRECTORY_BYTES: u64 = 64 << 10;

/// Size of the cache of a file whose size nobody knows; a remark says so.
const CACHE_DEFAULT_BYTES: u64 = 1_000_000_000;

/// Mounts of a job, of which one is its own.
const INPUT_VOLUMES_MAX: usize = 1_023;

/// Largest scripts that a job may have, less what is around them.
const SCRIPT_BYTES_MAX: usize = 130_000;

/// How a workflow is written.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// The URL of the directory in which the imported file is, with `/` at the end.
    pub home: String,
    /// Replaces all commands by stand-ins, which read their inputs, sleep for this share of their
    /// run time and write as many bytes.
    pub stand_in: Option<f64>,
}

/// A workflow as text.
#[derive(Debug, Clone)]
pub struct ImportedWorkflow {
    /// The workflow file.
    pub text: String,
    /// CSV for `bafs sim --trace`: run times and bytes, if the source has all of them.
    pub trace: Option<String>,
    /// What the user should know.
    pub remarks: Vec<String>,
}

/// A volume that tasks read.
struct InputVolume {
    name: String,
    /// Path of each file inside, by its index.
    files: BTreeMap<usize, String>,
}

struct Writer<'g> {
    graph: &'g TaskGraph,
    options: &'g TextOptions,
    jobs: Vec<String>,
    /// Volumes that hold files from home.
    sources: BTreeMap<usize, InputVolume>,
    /// The volume of each task that writes one.
    outputs: BTreeMap<usize, InputVolume>,
    text: String,
    trace: String,
    remarks: Vec<String>,
}

/// Writes the workflow of a graph.
///
/// # Errors
/// A task that reads the files of more tasks than a job has mounts, or needs too long a script.
pub fn write_workflow(
    graph: &TaskGraph,
    options: &TextOptions,
) -> Result<ImportedWorkflow, ImportError> {
    let mut names = NameTable::default();
    let jobs: Vec<_> = graph
        .tasks
        .iter()
        .map(|task| names.name(&task.name))
        .collect();
    let mut writer = Writer {
        graph,
        options,
        jobs,
        sources: BTreeMap::new(),
        outputs: BTreeMap::new(),
        text: String::new(),
        trace: "job,compute,volume,read,written\n".to_owned(),
        remarks: graph.remarks.clone(),
    };
    writer.write_sources()?;
    writer.write_outputs();
    for index in 0..graph.tasks.len() {
        writer.write_job(index)?;
    }
    writer.write_order();
    writer.write_extracts();
    let has_sizes = graph.files.iter().all(|file| file.size_bytes.is_some());
    let has_times = graph.tasks.iter().all(|task| task.runtime_s.is_some());
    let text = format_workflow("import", &writer.text)
        .map_err(|rejected| ImportError::new(format!("a fault of the importer: {rejected}")))?;
    Ok(ImportedWorkflow {
        text,
        trace: (has_sizes && has_times).then_some(writer.trace),
        remarks: writer.remarks,
    })
}

impl Writer<'_> {
    /// One volume for each file from home: a cache if several tasks read it.
    fn write_sources(&mut self) -> Result<(), ImportError> {
        let mut names = NameTable::default();
        let mut unknown = 0;
        for (index, file) in self.graph.files.iter().enumerate() {
            let role = self.graph.role(file);
            if file.producer.is_some() || role.is_none() {
                continue;
            }
            let name = names.name(&format!("in.{}", base_name(&file.path)));
            let url = quote_word(&self.url(&file.path));
            match (role, file.size_bytes) {
                // Only a cache takes the files of a directory without counting them.
                (Some(FileRole::Endpoint), Some(bytes)) if !file.is_directory => {
                    let bytes = round_up(bytes, PAGE_BYTES) + DIRECTORY_BYTES;
                    self.line(&format!("volume {name} scratch {bytes} B from {url}"));
                }
                (_, size) => {
                    unknown += usize::from(size.is_none());
                    let bytes = size.map_or(CACHE_DEFAULT_BYTES, cache_bytes);
                    self.line(&format!("volume {name} cache {url} {bytes} B"));
                }
            }
            // A file is alone in its volume, under its own name; a directory is the volume.
            let path = match file.is_directory {
                true => String::new(),
                false => base_name(&file.path).to_owned(),
            };
            let files = BTreeMap::from([(index, path)]);
            self.sources.insert(index, InputVolume { name, files });
        }
        if unknown > 0 {
            self.remarks.push(format!(
                "the sizes of {unknown} inputs are not known; correct their caches, of 1 GB each"
            ));
        }
        Ok(())
    }

    fn write_outputs(&mut self) {
        let mut names = NameTable::default();
        for (index, task) in self.graph.tasks.iter().enumerate() {
            if task.outputs.is_empty() {
                continue;
            }
            let name = names.name(&format!("out.{}", self.jobs[index]));
            let size = self.scratch_bytes(task);
            let size = size.map_or_else(|| "unknown".to_owned(), |bytes| format!("{bytes} B"));
            self.line(&format!("volume {name} scratch {size}"));
            let files = task
                .outputs
                .iter()
                .map(|it| (it.file, it.local().to_owned()))
                .collect();
            self.outputs.insert(index, InputVolume { name, files });
        }
    }

    /// Space for what a task writes, and for the links to its inputs.
    fn scratch_bytes(&self, task: &Task) -> Option<u64> {
        let sizes = task
            .outputs
            .iter()
            .map(|it| self.graph.files[it.file].size_bytes);
        let sizes: Option<Vec<_>> = sizes.collect();
        let files = sizes?.into_iter().map(|bytes| round_up(bytes, PAGE_BYTES));
        let links = PAGE_BYTES * task.inputs.len() as u64;
        Some(files.sum::<u64>() + links + DIRECTORY_BYTES)
    }

    /// The volumes that a task reads, with the files in each.
    fn list_inputs(&self, task: &Task) -> BTreeMap<&str, (&InputVolume, Vec<usize>)> {
        let mut volumes = BTreeMap::new();
        for (at, input) in task.inputs.iter().enumerate() {
            let producer = self.graph.files[input.file].producer;
            let volume = match producer {
                Some(producer) => self.outputs.get(&producer),
                None => self.sources.get(&input.file),
            };
            if let Some(volume) = volume {
                let entry = volumes.entry(volume.name.as_str());
                entry.or_insert((volume, Vec::new())).1.push(at);
            }
        }
        volumes
    }

    fn write_job(&mut self, index: usize) -> Result<(), ImportError> {
        let task = &self.graph.tasks[index];
        let job = self.jobs[index].clone();
        let inputs = self.list_inputs(task);
        if inputs.len() > INPUT_VOLUMES_MAX {
            return Err(ImportError::new(format!(
                "'{}' reads the files of {} tasks; a job of BAFS reads {INPUT_VOLUMES_MAX} volumes \
                 at most, so let tasks in between gather them",
                task.name,
                inputs.len()
            )));
        }
        let script = self.build_script(task, &inputs);
        if script.len() > SCRIPT_BYTES_MAX {
            let why = format!(
                "'{}' has so many files that its script is too long",
                task.name
            );
            return Err(ImportError::new(why));
        }
        let mut mounts = String::new();
        if let Some(volume) = self.outputs.get(&index) {
            let _ = writeln!(mounts, "mount {} {job} {WORK}", volume.name);
        }
        for name in inputs.keys() {
            let _ = writeln!(mounts, "mount {name} {job} {INPUTS}/{name} ro");
        }
        self.append_trace(task, index, &job);
        let body = self.build_body(task, index, &script);
        self.line(&format!("job {job} {{\n{body}}}"));
        self.text.push_str(&mounts);
        Ok(())
    }

    /// The rows of a job: its run time, what it reads of each volume, what it writes.
    fn append_trace(&mut self, task: &Task, index: usize, job: &str) {
        let size = |file: usize| self.graph.files[file].size_bytes.unwrap_or(0);
        let mut rows = format!("{job},{},,,\n", task.runtime_s.unwrap_or(0.0));
        for (name, (_, uses)) in self.list_inputs(task) {
            let bytes: u64 = uses.iter().map(|at| size(task.inputs[*at].file)).sum();
            let _ = writeln!(rows, "{job},,{name},{bytes} B,");
        }
        if let Some(volume) = self.outputs.get(&index) {
            let bytes: u64 = task.outputs.iter().map(|it| size(it.file)).sum();
            let _ = writeln!(rows, "{job},,{},,{bytes} B", volume.name);
        }
        self.trace.push_str(&rows);
    }

    fn build_body(&self, task: &Task, index: usize, script: &str) -> String {
        let mut body = String::new();
        if let Some(seconds) = task.runtime_s {
            let _ = writeln!(body, "runtime = {}", seconds.ceil().max(1.0) as u64);
        }
        if let Some(cpus) = task.cpus.filter(|cpus| *cpus > 1) {
            let _ = writeln!(body, "request_cpus = {cpus}");
        }
        if let Some(bytes) = task.memory_bytes {
            let _ = writeln!(body, "request_memory = {bytes} B");
        }
        if let Some(bytes) = task.disk_bytes {
            let _ = writeln!(body, "request_disk = {bytes} B");
        }
        if task.retries > 0 {
            let _ = writeln!(body, "retry = {}", task.retries);
        }
        if task.priority != 0 {
            let _ = writeln!(body, "priority = {}", task.priority);
        }
        if !task.environment.is_empty() {
            let pairs = task.environment.iter();
            let words: Vec<_> = pairs
                .map(|(name, value)| quote_word(&format!("{name}={value}")))
                .collect();
            let _ = writeln!(body, "environment = {}", words.join(" "));
        }
        for (key, local) in ["output", "error"].into_iter().zip(&task.streams) {
            if let Some(local) = local {
                let _ = writeln!(body, "{key} = {}", quote_word(&format!("{WORK}/{local}")));
            }
        }
        if !self.outputs.contains_key(&index) {
            let _ = writeln!(body, "directory = /tmp");
        }
        // Inside a word of several lines, blanks would count.
        let is_plain = !task.has_line_breaks();
        let indent = |line: &str| format!("{}{line}\n", if is_plain { "    " } else { "" });
        let script: String = script.lines().map(indent).collect();
        let mut end = "END".to_owned();
        while script.lines().any(|line| line.trim() == end) {
            end.push('_');
        }
        let _ = write!(body, "script = <<'{end}'\n{script}  {end}\n");
        body
    }

    fn build_script(
        &self,
        task: &Task,
        inputs: &BTreeMap<&str, (&InputVolume, Vec<usize>)>,
    ) -> String {
        let mut script = String::new();
        let streams: Vec<_> = task.streams.iter().flatten().collect();
        let outputs = task
            .outputs
            .iter()
            .filter(|it| streams.iter().all(|stream| *stream != it.local()));
        let paths = task.inputs.iter().chain(outputs).map(FileUse::local);
        let directories: BTreeSet<_> = paths
            .filter_map(|path| path.rsplit_once('/').map(|(directory, _)| directory))
            .collect();
        if !directories.is_empty() {
            let words: Vec<_> = directories.into_iter().map(quote_shell).collect();
            let _ = writeln!(script, "mkdir -p {}", words.join(" "));
        }
        // Links of one command have their own names; others need one each.
        let mut plain: Vec<String> = Vec::new();
        for (name, (volume, uses)) in inputs {
            for at in uses {
                let input = &task.inputs[*at];
                let path = format!("{INPUTS}/{name}/{}", volume.files[&input.file]);
                let path = path.trim_end_matches('/').to_owned();
                match base_name(&path) == input.local() {
                    true => plain.push(quote_shell(&path)),
                    false => {
                        let (path, local) = (quote_shell(&path), quote_shell(input.local()));
                        let _ = writeln!(script, "ln -sf {path} {local}");
                    }
                }
            }
        }
        if !plain.is_empty() {
            let _ = writeln!(script, "ln -sf {} .", plain.join(" "));
        }
        let command = match self.options.stand_in {
            Some(_) => TaskCommand::Unknown,
            None => task.command.clone(),
        };
        match command {
            TaskCommand::Words(words) => {
                let words: Vec<_> = words.iter().map(|word| quote_shell(word)).collect();
                let _ = writeln!(script, "exec {}", words.join(" "));
            }
            TaskCommand::Shell(line) => {
                let _ = writeln!(script, "{line}");
            }
            TaskCommand::Unknown => script.push_str(&self.build_stand_in(task)),
        }
        script
    }

    /// Reads the inputs, sleeps, and writes the outputs.
    fn build_stand_in(&self, task: &Task) -> String {
        let mut script = String::new();
        if !task.inputs.is_empty() {
            let words: Vec<_> = task
                .inputs
                .iter()
                .map(|it| quote_shell(it.local()))
                .collect();
            let _ = writeln!(script, "cat {} > /dev/null", words.join(" "));
        }
        let share = self.options.stand_in.unwrap_or(1.0);
        if let Some(seconds) = task.runtime_s {
            let _ = writeln!(script, "sleep {:.3}", seconds * share);
        }
        for output in &task.outputs {
            let bytes = self.graph.files[output.file].size_bytes.unwrap_or(1);
            let local = quote_shell(output.local());
            let _ = writeln!(script, "head -c {bytes} /dev/zero > {local}");
        }
        script
    }

    /// Edges, with the parents of equal children in one statement.
    fn write_order(&mut self) {
        let mut children: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for (index, task) in self.graph.tasks.iter().enumerate() {
            if !task.parents.is_empty() {
                let parents = task.parents.iter().copied().collect();
                children.entry(parents).or_default().push(index);
            }
        }
        for (parents, children) in children {
            let names = |tasks: &[usize]| -> String {
                let names: Vec<_> = tasks.iter().map(|it| self.jobs[*it].as_str()).collect();
                names.join(" ")
            };
            let statement = format!("parent {} child {}", names(&parents), names(&children));
            self.line(&statement);
        }
    }

    /// Outputs that no task reads go home.
    fn write_extracts(&mut self) {
        let last = |file: &WorkflowFile| file.producer.filter(|_| file.readers.is_empty());
        for (index, file) in self.graph.files.iter().enumerate() {
            let volume = last(file).and_then(|producer| self.outputs.get(&producer));
            if let Some(volume) = volume {
                let path = quote_word(&volume.files[&index]);
                let statement = format!(
                    "extract {} {path} {}",
                    volume.name,
                    quote_word(&self.url(&file.path))
                );
                self.line(&statement);
            }
        }
    }

    fn url(&self, path: &str) -> String {
        match path {
            path if path.contains("://") => path.to_owned(),
            path if path.starts_with('/') => format!("file://{path}"),
            path => format!("{}{path}", self.options.home),
        }
    }

    fn line(&mut self, statement: &str) {
        self.text.push_str(statement);
        self.text.push('\n');
    }
}

fn round_up(bytes: u64, unit: u64) -> u64 {
    bytes.div_ceil(unit) * unit
}

/// A tenth more than the file, in whole blocks, as the reference of the language advises.
fn cache_bytes(bytes: u64) -> u64 {
    round_up(bytes + bytes / 10, BLOCK_BYTES) + BLOCK_BYTES
}

#[cfg(test)]
mod tests {
    use bafs_workflow::{CheckedWorkflow, parse_workflow};

    use super::*;

    fn options() -> TextOptions {
        TextOptions {
            home: "bafs://home/".to_owned(),
            stand_in: None,
        }
    }

    fn check(text: &str) -> CheckedWorkflow {
        let none = |_: &str| Err("no files".to_owned());
        let checked = parse_workflow("w.bafs", text, &none);
        checked.unwrap_or_else(|rejected| panic!("{rejected}\n{text}"))
    }

    /// Two tasks that read one file; a third one reads what they write.
    fn diamond() -> TaskGraph {
        let mut graph = TaskGraph::default();
        let files = ["db", "a 1", "d/b", "result"].map(|path| graph.file(path));
        for file in &mut graph.files {
            file.size_bytes = Some(5_000);
        }
        let task = |name: &str, inputs: &[usize], outputs: &[usize], graph: &TaskGraph| {
            let words = vec!["tool".to_owned(), "it's $(here)".to_owned()];
            let mut task = Task::new(name, TaskCommand::Words(words));
            let uses = |list: &[usize]| -> Vec<FileUse> {
                let uses = list.iter();
                let uses = uses.map(|file| FileUse::new(*file, &graph.files[*file].path));
                uses.collect::<Result<_, _>>().expect("relative paths")
            };
            task.inputs = uses(inputs);
            task.outputs = uses(outputs);
            task.runtime_s = Some(1.25);
            task
        };
        let tasks = [
            task("a", &files[..1], &files[1..2], &graph),
            task("b", &files[..1], &files[2..3], &graph),
            task("a", &files[1..3], &files[3..], &graph),
        ];
        graph.tasks.extend(tasks);
        graph.complete().expect("a graph");
        graph
    }

    #[test]
    fn written_workflow_passes_the_check() {
        let written = write_workflow(&diamond(), &options()).expect("a workflow");
        let checked = check(&written.text);
        assert_eq!(checked.warnings, [], "{}", written.text);
        assert_eq!(checked.workflow.jobs.len(), 3);
        assert!(
            written.text.contains("cache bafs://home/db 131072 B"),
            "{}",
            written.text
        );
        assert!(
            written
                .text
                .contains("extract out.a.2 result bafs://home/result"),
            "{}",
            written.text
        );
        assert!(
            written.text.contains(r"exec tool 'it'\''s $(here)'"),
            "{}",
            written.text
        );
        let trace = written.trace.expect("times and sizes are known");
        assert!(
            trace.contains("a.2,1.25,,,\na.2,,out.a,5000 B,\na.2,,out.b,5000 B,\n"),
            "{trace}"
        );
    }

    #[test]
    fn directory_is_linked_to_its_whole_volume() {
        let mut graph = diamond();
        graph.files[0].is_directory = true;
        let text = write_workflow(&graph, &options()).expect("a workflow").text;
        check(&text);
        assert!(text.contains("ln -sf /bafs/in/in.db db\n"), "{text}");
    }

    #[test]
    fn links_stay_in_the_directory_of_the_task() {
        for path in ["/data/x", "../x", "a/../../x"] {
            assert!(FileUse::new(0, path).is_err(), "{path}");
        }
    }

    #[test]
    fn stand_ins_read_wait_and_write() {
        let half = TextOptions {
            stand_in: Some(0.5),
            ..options()
        };
        let text = write_workflow(&diamond(), &half).expect("a workflow").text;
        check(&text);
        assert!(
            text.contains("sleep 0.625") && text.contains("head -c 5000"),
            "{text}"
        );
        assert!(!text.contains("tool"), "{text}");
    }

    #[test]
    fn unknown_sizes_are_measured_by_the_run() {
        let mut graph = diamond();
        graph
            .files
            .iter_mut()
            .for_each(|file| file.size_bytes = None);
        let written = write_workflow(&graph, &options()).expect("a workflow");
        check(&written.text);
        assert!(written.text.contains("scratch unknown") && written.trace.is_none());
        assert!(
            written.remarks[0].contains("sizes of 1 inputs"),
            "{:?}",
            written.remarks
        );
    }

    #[test]
    fn too_many_inputs_are_refused() {
        let mut graph = TaskGraph::default();
        let mut last = Task::new("last", TaskCommand::Unknown);
        for at in 0..1_024 {
            let file = graph.file(&format!("f{at}"));
            let mut task = Task::new(format!("t{at}"), TaskCommand::Unknown);
            let one = FileUse::new(file, &format!("f{at}")).expect("a relative path");
            task.outputs.push(one.clone());
            last.inputs.push(one);
            graph.tasks.push(task);
        }
        graph.tasks.push(last);
        graph.complete().expect("a graph");
        let said = write_workflow(&graph, &options()).expect_err("too many mounts");
        assert!(
            said.message.contains("reads the files of 1024 tasks"),
            "{said}"
        );
    }
}
