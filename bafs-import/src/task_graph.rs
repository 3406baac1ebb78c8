//! Tasks, files and their roles, whatever system they are from. Knows no syntax.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::sources::ImportError;
use crate::words::normalise_path;

/// What a task runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TaskCommand {
    /// A program and its arguments.
    Words(Vec<String>),
    /// A line for a shell.
    Shell(String),
    /// Not known: a stand-in that reads, waits and writes as much.
    Unknown,
}

/// A file as a task sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileUse {
    pub(crate) file: usize,
    local: String,
}

impl FileUse {
    /// A file at a path below the working directory of the task.
    ///
    /// # Errors
    /// The path leaves that directory: a link there would replace a file of the machine.
    pub(crate) fn new(file: usize, local: &str) -> Result<Self, ImportError> {
        let below = normalise_path(local).filter(|path| !path.starts_with('/'));
        let outside = || {
            ImportError::new(format!(
                "'{local}' is outside of the directory in which the task runs"
            ))
        };
        let local = below.ok_or_else(outside)?;
        Ok(Self { file, local })
    }

    /// Path below the working directory of the task.
    pub(crate) fn local(&self) -> &str {
        &self.local
    }
}

/// One program of the imported workflow.
#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub(crate) name: String,
    pub(crate) command: TaskCommand,
    pub(crate) inputs: Vec<FileUse>,
    pub(crate) outputs: Vec<FileUse>,
    /// Tasks that end before this one starts.
    pub(crate) parents: BTreeSet<usize>,
    pub(crate) runtime_s: Option<f64>,
    pub(crate) cpus: Option<u32>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) disk_bytes: Option<u64>,
    pub(crate) retries: u32,
    pub(crate) priority: i32,
    pub(crate) environment: Vec<(String, String)>,
    /// Names of the files for standard output and standard error, among the outputs.
    pub(crate) streams: [Option<String>; 2],
}

impl Task {
    /// Whether a word of the command, or the path of a file, has several lines.
    pub(crate) fn has_line_breaks(&self) -> bool {
        let uses = self.inputs.iter().chain(&self.outputs).map(|it| &it.local);
        let words: &[String] = match &self.command {
            TaskCommand::Words(words) => words,
            TaskCommand::Shell(line) => std::slice::from_ref(line),
            TaskCommand::Unknown => &[],
        };
        uses.chain(words).any(|text| text.contains('\n'))
    }

    pub(crate) fn new(name: impl Into<String>, command: TaskCommand) -> Self {
        Self {
            name: name.into(),
            command,
            inputs: Vec::new(),
            outputs: Vec::new(),
            parents: BTreeSet::new(),
            runtime_s: None,
            cpus: None,
            memory_bytes: None,
            disk_bytes: None,
            retries: 0,
            priority: 0,
            environment: Vec::new(),
            streams: [None, None],
        }
    }
}

/// A file of the workflow.
#[derive(Debug, Clone)]
pub(crate) struct WorkflowFile {
    /// Path relative to the directory of the imported file, an absolute path, or a URL.
    pub(crate) path: String,
    pub(crate) size_bytes: Option<u64>,
    pub(crate) is_directory: bool,
    pub(crate) producer: Option<usize>,
    pub(crate) readers: Vec<usize>,
}

/// How the workflow uses a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileRole {
    /// From home, read by several tasks: cached near them.
    Batch,
    /// Written by one task and read by others: stays on the nodes.
    Pipeline,
    /// From home for one task, or a last output, which goes home.
    Endpoint,
}

/// The files of one role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RoleTotal {
    /// The role.
    pub role: FileRole,
    /// How many files.
    pub files: usize,
    /// Their bytes, as far as sizes are known.
    pub bytes: u64,
}

/// An imported workflow before it is written.
#[derive(Debug, Clone, Default)]
pub struct TaskGraph {
    pub(crate) tasks: Vec<Task>,
    pub(crate) files: Vec<WorkflowFile>,
    by_path: BTreeMap<String, usize>,
    /// What differs from the system of origin, for the user.
    pub remarks: Vec<String>,
}

impl TaskGraph {
    /// The file of a path, which is new if it has not been named.
    pub(crate) fn file(&mut self, path: &str) -> usize {
        if let Some(found) = self.by_path.get(path) {
            return *found;
        }
        let index = self.files.len();
        self.by_path.insert(path.to_owned(), index);
        self.files.push(WorkflowFile {
            path: path.to_owned(),
            size_bytes: None,
            is_directory: false,
            producer: None,
            readers: Vec::new(),
        });
        index
    }

    /// Derives producers, readers and edges from the uses, and checks them.
    pub(crate) fn complete(&mut self) -> Result<(), ImportError> {
        for index in 0..self.tasks.len() {
            self.drop_changed_inputs(index);
        }
        for (index, task) in self.tasks.iter().enumerate() {
            for output in &task.outputs {
                let file = &mut self.files[output.file];
                if let Some(other) = file.producer.replace(index).filter(|it| *it != index) {
                    return Err(ImportError::new(format!(
                        "'{}' is written by '{}' and by '{}'; a file has one writer in BAFS",
                        file.path, self.tasks[other].name, task.name
                    )));
                }
            }
        }
        for index in 0..self.tasks.len() {
            let read: BTreeSet<_> = self.tasks[index].inputs.iter().map(|it| it.file).collect();
            for file in read {
                self.files[file].readers.push(index);
                if let Some(producer) = self.files[file].producer {
                    self.tasks[index].parents.insert(producer);
                }
            }
        }
        self.check_order()
    }

    /// A file that a task reads and writes counts as its output: nobody else may have made it.
    fn drop_changed_inputs(&mut self, index: usize) {
        let task = &mut self.tasks[index];
        let written: BTreeSet<_> = task.outputs.iter().map(|it| it.file).collect();
        let before = task.inputs.len();
        task.inputs.retain(|it| !written.contains(&it.file));
        if task.inputs.len() < before {
            let name = task.name.clone();
            self.remarks.push(format!(
                "'{name}' reads and writes the same file: it starts without it"
            ));
        }
    }

    fn check_order(&self) -> Result<(), ImportError> {
        let mut open: Vec<_> = self.tasks.iter().map(|task| task.parents.len()).collect();
        let mut children = vec![Vec::new(); self.tasks.len()];
        for (index, task) in self.tasks.iter().enumerate() {
            for parent in &task.parents {
                children[*parent].push(index);
            }
        }
        let mut ready: Vec<_> = (0..open.len()).filter(|index| open[*index] == 0).collect();
        let mut done = 0;
        while let Some(index) = ready.pop() {
            done += 1;
            for child in &children[index] {
                open[*child] -= 1;
                if open[*child] == 0 {
                    ready.push(*child);
                }
            }
        }
        if done == self.tasks.len() {
            return Ok(());
        }
        let stuck = open.iter().position(|left| *left > 0).unwrap_or(0);
        let name = &self.tasks[stuck].name;
        Err(ImportError::new(format!(
            "'{name}' waits for itself: the order has a cycle"
        )))
    }

    /// The role of a file; nothing if no task uses it.
    pub(crate) fn role(&self, file: &WorkflowFile) -> Option<FileRole> {
        match (file.producer, file.readers.len()) {
            (None, 0) => None,
            (None, 1) | (Some(_), 0) => Some(FileRole::Endpoint),
            (None, _) => Some(FileRole::Batch),
            (Some(_), _) => Some(FileRole::Pipeline),
        }
    }

    /// The number of tasks.
    #[must_use]
    pub fn count_tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Files and bytes by role.
    #[must_use]
    pub fn total_roles(&self) -> Vec<RoleTotal> {
        let mut totals: BTreeMap<FileRole, RoleTotal> = BTreeMap::new();
        for file in &self.files {
            let Some(role) = self.role(file) else {
                continue;
            };
            let total = totals.entry(role).or_insert(RoleTotal {
                role,
                files: 0,
                bytes: 0,
            });
            total.files += 1;
            total.bytes = total.bytes.saturating_add(file.size_bytes.unwrap_or(0));
        }
        totals.into_values().collect()
    }
}
