//! Makeflow: rules in the syntax of Make.

use std::collections::BTreeMap;

use crate::sources::{ImportError, Sources};
use crate::submit_file::join_lines;
use crate::task_graph::{FileUse, Task, TaskCommand, TaskGraph};
use crate::words::{normalise_path, parse_size};

/// Variables that hold the resources of the rules below them.
const RESOURCES: [&str; 3] = ["CORES", "MEMORY", "DISK"];

/// The state of a reader at a line.
#[derive(Debug, Default)]
struct Scope {
    variables: BTreeMap<String, String>,
    exported: Vec<String>,
    /// Resources by category, as they were set under `CATEGORY = name`.
    resources: BTreeMap<(String, String), String>,
}

/// A rule before its command is known.
#[derive(Debug)]
struct Rule {
    line: usize,
    targets: Vec<String>,
    sources: Vec<String>,
}

/// Reads a Makeflow.
///
/// # Errors
/// A line that is no rule, variable or directive, a nested MAKEFLOW, a file with several writers,
/// or a cycle. The JSON forms of Makeflow (JX) are not read.
pub fn read_makeflow(text: &str, sources: &dyn Sources) -> Result<TaskGraph, ImportError> {
    if text.trim_start().starts_with('{') {
        return Err(ImportError::new(
            "this is JX, the JSON form; convert it with `makeflow_viz` or `jx2json` into rules",
        ));
    }
    let mut graph = TaskGraph::default();
    let mut scope = Scope::default();
    let mut sizes = BTreeMap::new();
    let mut open: Option<Rule> = None;
    for (line, text) in join_indented_lines(text) {
        if text.starts_with(['\t', ' ']) {
            let Some(rule) = open.take() else {
                return Err(ImportError::at(line, "a command without a rule above it"));
            };
            add_task(&mut graph, &scope, &rule, text.trim())?;
            continue;
        }
        if let Some(rule) = open.take() {
            return Err(ImportError::at(rule.line, "a rule without a command"));
        }
        if let Some(directive) = text.strip_prefix('.') {
            read_directive(line, directive, &mut scope, &mut sizes, &mut graph)?;
            continue;
        }
        if read_assignment(&text, &mut scope) {
            continue;
        }
        let Some((targets, inputs)) = text.split_once(':') else {
            return Err(ImportError::at(
                line,
                format!("'{text}' is no rule and no variable"),
            ));
        };
        let words = |text: &str| -> Vec<String> {
            let text = expand(text, &scope.variables);
            text.split_whitespace().map(str::to_owned).collect()
        };
        open = Some(Rule {
            line,
            targets: words(targets),
            sources: words(inputs),
        });
    }
    if let Some(rule) = open {
        return Err(ImportError::at(rule.line, "a rule without a command"));
    }
    for file in &mut graph.files {
        let told = sizes.get(&file.path).copied();
        file.size_bytes = told.or_else(|| sources.size(&file.path));
        file.is_directory = sources.is_directory(&file.path);
    }
    graph.complete()?;
    for file in graph
        .files
        .iter_mut()
        .filter(|file| file.producer.is_some())
    {
        file.size_bytes = sizes.get(&file.path).copied();
        file.is_directory = false;
    }
    Ok(graph)
}

/// Lines as [`join_lines`] has them, with a tab in front where they are commands.
fn join_indented_lines(text: &str) -> Vec<(usize, String)> {
    let firsts: Vec<_> = text.lines().collect();
    let first_of = |number: usize| firsts.get(number - 1).copied().unwrap_or_default();
    let lines = join_lines(text).into_iter().map(|(number, line)| {
        let is_command = first_of(number).starts_with(['\t', ' ']);
        let indent = if is_command { "\t" } else { "" };
        let line = match is_command {
            true => line,
            false => line
                .split(" #")
                .next()
                .unwrap_or_default()
                .trim_end()
                .to_owned(),
        };
        (number, format!("{indent}{line}"))
    });
    lines.collect()
}

/// Sets a variable, if the line does.
fn read_assignment(text: &str, scope: &mut Scope) -> bool {
    let exported = text.strip_prefix("export ");
    let text = exported.unwrap_or(text);
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let Some((name, value)) = text.split_once('=') else {
        if let Some(names) = exported {
            scope
                .exported
                .extend(names.split_whitespace().map(str::to_owned));
        }
        return exported.is_some();
    };
    let (name, is_appended) = match name.trim_end().strip_suffix('+') {
        Some(name) => (name.trim(), true),
        None => (name.trim(), false),
    };
    if !is_name(name) {
        return false;
    }
    let value = expand(value.trim().trim_matches('"'), &scope.variables);
    let before = scope.variables.get(name).filter(|_| is_appended);
    let value = before.map_or_else(|| value.clone(), |before| format!("{before} {value}"));
    if RESOURCES.contains(&name) {
        let category = scope.category();
        scope
            .resources
            .insert((category, name.to_owned()), value.clone());
    }
    if exported.is_some() {
        scope.exported.push(name.to_owned());
    }
    scope.variables.insert(name.to_owned(), value);
    true
}

impl Scope {
    fn category(&self) -> String {
        self.variables.get("CATEGORY").cloned().unwrap_or_default()
    }

    fn resource(&self, name: &str) -> Option<&str> {
        let category = self.category();
        let own = self.resources.get(&(category, name.to_owned()));
        let any = || self.resources.get(&(String::new(), name.to_owned()));
        own.or_else(any).map(String::as_str)
    }
}

fn read_directive(
    line: usize,
    directive: &str,
    scope: &mut Scope,
    sizes: &mut BTreeMap<String, u64>,
    graph: &mut TaskGraph,
) -> Result<(), ImportError> {
    let words: Vec<_> = directive.split_whitespace().collect();
    match words.as_slice() {
        ["MAKEFLOW", "CATEGORY", name] => {
            scope
                .variables
                .insert("CATEGORY".to_owned(), (*name).to_owned());
        }
        ["MAKEFLOW", name, value] if RESOURCES.contains(name) => {
            scope
                .resources
                .insert((scope.category(), (*name).to_owned()), (*value).to_owned());
        }
        ["MAKEFLOW", "SIZE", file, size] | ["SIZE", file, size] => {
            let bytes = parse_size(size, 1);
            let bytes =
                bytes.ok_or_else(|| ImportError::at(line, format!("'{size}' is no size")))?;
            sizes.insert((*file).to_owned(), bytes);
        }
        _ => graph
            .remarks
            .push(format!("line {line}: .{directive} has no effect")),
    }
    Ok(())
}

fn add_task(
    graph: &mut TaskGraph,
    scope: &Scope,
    rule: &Rule,
    command: &str,
) -> Result<(), ImportError> {
    let mut command = command.trim_start_matches('@').trim();
    for (word, why) in [(
        "MAKEFLOW",
        "a workflow inside a workflow; import that file by itself",
    )] {
        if command.split_whitespace().next() == Some(word) {
            return Err(ImportError::at(
                rule.line,
                format!("{word} is not supported: {why}"),
            ));
        }
    }
    if let Some(rest) = command.strip_prefix("LOCAL ") {
        let remark = format!(
            "line {}: LOCAL has no effect, the rule runs on a node",
            rule.line
        );
        graph.remarks.push(remark);
        command = rest.trim_start();
    }
    let name = rule.targets.first().map_or("rule", String::as_str);
    let name = name.split("->").next().unwrap_or(name).to_owned();
    let command = expand(command, &scope.variables);
    let mut task = Task::new(name, TaskCommand::Shell(command));
    let (of_machine, sources): (Vec<_>, Vec<_>) =
        rule.sources.iter().partition(|name| is_of_machine(name));
    for name in of_machine {
        graph.remarks.push(format!(
            "line {}: '{name}' is a path of the machine; each node must have it",
            rule.line
        ));
    }
    task.inputs = list_uses(graph, rule, &sources)?;
    task.outputs = list_uses(graph, rule, &rule.targets.iter().collect::<Vec<_>>())?;
    if task.outputs.is_empty() {
        return Err(ImportError::at(rule.line, "a rule without a target"));
    }
    task.cpus = scope.resource("CORES").and_then(|text| text.parse().ok());
    task.memory_bytes = scope
        .resource("MEMORY")
        .and_then(|text| parse_size(text, 1 << 20));
    task.disk_bytes = scope
        .resource("DISK")
        .and_then(|text| parse_size(text, 1 << 20));
    for name in &scope.exported {
        let value = scope.variables.get(name).cloned();
        task.environment
            .push((name.clone(), value.unwrap_or_default()));
    }
    graph.tasks.push(task);
    Ok(())
}

/// Whether the command finds a source at an absolute path, such as a program.
fn is_of_machine(name: &str) -> bool {
    name.starts_with('/') && !name.contains("->")
}

/// Files of a rule; `a->b` is `b` where the command runs.
fn list_uses(
    graph: &mut TaskGraph,
    rule: &Rule,
    names: &[&String],
) -> Result<Vec<FileUse>, ImportError> {
    let mut uses: Vec<FileUse> = Vec::new();
    for name in names {
        let (path, local) = name
            .split_once("->")
            .unwrap_or((name.as_str(), name.as_str()));
        let outside = || {
            let why =
                format!("'{name}' is above the directory of the Makeflow; move the file there");
            ImportError::at(rule.line, why)
        };
        let path = normalise_path(path).ok_or_else(outside)?;
        let file = graph.file(&path);
        let used = FileUse::new(file, local);
        let used = used.map_err(|error| ImportError::at(rule.line, error.message))?;
        if uses.iter().all(|it| it.file != file) {
            uses.push(used);
        }
    }
    Ok(uses)
}

/// Replaces `$NAME`, `${NAME}` and `$(NAME)` of variables that are set; `$$` is a dollar.
fn expand(text: &str, variables: &BTreeMap<String, String>) -> String {
    let mut done = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('$') {
        done.push_str(&rest[..start]);
        let behind = &rest[start + 1..];
        if let Some(behind) = behind.strip_prefix('$') {
            done.push('$');
            rest = behind;
            continue;
        }
        let closing = match behind.chars().next() {
            Some('(') => Some(')'),
            Some('{') => Some('}'),
            _ => None,
        };
        let (name, after) = match closing.and_then(|c| Some((c, behind.find(c)?))) {
            Some((c, end)) => (&behind[1..end], &behind[end + c.len_utf8()..]),
            None => {
                let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
                let end = behind.find(|c| !is_part(c)).unwrap_or(behind.len());
                (&behind[..end], &behind[end..])
            }
        };
        match variables.get(name) {
            Some(value) => {
                done.push_str(value);
                rest = after;
            }
            None => {
                done.push('$');
                rest = behind;
            }
        }
    }
    done.push_str(rest);
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task_graph::FileRole;

    struct NoFiles;

    impl Sources for NoFiles {
        fn read(&self, _path: &str) -> Result<String, String> {
            Err("no files".to_owned())
        }

        fn size(&self, path: &str) -> Option<u64> {
            (path == "capitol.jpg").then_some(3_000)
        }

        fn is_directory(&self, _path: &str) -> bool {
            false
        }
    }

    const FLOW: &str = "CONVERT=/usr/bin/convert\nexport LANG=C\nMEMORY=100\n\n\
        capitol.montage.gif: capitol.jpg capitol.90.jpg\n\
        \t$CONVERT -delay 10 capitol.jpg capitol.90.jpg capitol.montage.gif\n\n\
        capitol.90.jpg: capitol.jpg\n\t${CONVERT} -swirl 90 capitol.jpg $$HOME capitol.90.jpg\n";

    #[test]
    fn rules_become_tasks_in_any_order() {
        let graph = read_makeflow(FLOW, &NoFiles).expect("a graph");
        let second = "/usr/bin/convert -swirl 90 capitol.jpg $HOME capitol.90.jpg";
        assert_eq!(
            graph.tasks[1].command,
            TaskCommand::Shell(second.to_owned())
        );
        assert!(graph.tasks[0].parents.contains(&1));
        assert_eq!(graph.tasks[0].memory_bytes, Some(100 << 20));
        assert_eq!(
            graph.tasks[0].environment,
            [("LANG".to_owned(), "C".to_owned())]
        );
        let roles: Vec<_> = graph
            .total_roles()
            .iter()
            .map(|it| (it.role, it.bytes))
            .collect();
        let expected = [
            (FileRole::Batch, 3_000),
            (FileRole::Pipeline, 0),
            (FileRole::Endpoint, 0),
        ];
        assert_eq!(roles, expected);
    }

    #[test]
    fn files_may_have_another_name_inside() {
        let graph = read_makeflow("out/b->b: in/a->a\n\tcp a b\n", &NoFiles).expect("a graph");
        assert_eq!(graph.tasks[0].inputs[0].local(), "a");
        assert_eq!(graph.files[graph.tasks[0].outputs[0].file].path, "out/b");
    }

    #[test]
    fn absolute_sources_are_left_to_the_node() {
        let text = "out: in /usr/bin/sort\n\t/usr/bin/sort in > out\n";
        let graph = read_makeflow(text, &NoFiles).expect("a graph");
        assert_eq!(graph.tasks[0].inputs.len(), 1);
        let expected = "line 1: '/usr/bin/sort' is a path of the machine; each node must have it";
        assert_eq!(graph.remarks, [expected]);
    }

    #[test]
    fn malformed_rules_are_refused() {
        for (text, expected) in [
            ("a: b\n", "a rule without a command"),
            ("\tcp a b\n", "a command without a rule"),
            ("a: b\n\tMAKEFLOW c.mf\n", "MAKEFLOW is not supported"),
            ("a: b\n\tcp b a\na: c\n\tcp c a\n", "a file has one writer"),
            ("a: a.b\n\tx\na.b: a\n\ty\n", "cycle"),
            ("nonsense\n", "no rule and no variable"),
            ("/abs/a: b\n\tx\n", "'/abs/a' is outside of the directory"),
            (
                "a: b->/abs/b\n\tx\n",
                "'/abs/b' is outside of the directory",
            ),
            ("{\"rules\": []}", "JX"),
        ] {
            let said = read_makeflow(text, &NoFiles).expect_err(text).to_string();
            assert!(said.contains(expected), "{text}: {said}");
        }
    }
}
