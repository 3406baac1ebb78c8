//! The statements of a `.dag` file. Reads no submit files.

use std::collections::{BTreeMap, BTreeSet};

use crate::sources::ImportError;
use crate::submit_file::join_lines;

/// Statements that change when or how often jobs run, but not what they compute.
const IGNORED_STATEMENTS: &[&str] = &[
    "category",
    "maxjobs",
    "config",
    "dot",
    "node_status_file",
    "jobstate_log",
    "set_job_attr",
    "save_point_file",
    "env",
    "abort-dag-on",
];

/// Statements that BAFS cannot run, with the reason.
const REFUSED_STATEMENTS: &[(&str, &str)] = &[
    (
        "splice",
        "names of jobs of another file; paste its statements, or import it by itself",
    ),
    (
        "subdag",
        "a workflow that is known only when it runs; import that file by itself",
    ),
    ("include", "another file; paste its statements"),
    (
        "final",
        "a job that runs after a failure, too; run it after `bafs run`",
    ),
    ("service", "a job beside the others; start it by itself"),
    (
        "provisioner",
        "a job beside the others; `bafs run --pool` starts nodes",
    ),
    ("pre_skip", "a PRE script that decides whether a job runs"),
    ("connect", "pins of splices"),
    ("pin_in", "pins of splices"),
    ("pin_out", "pins of splices"),
];

/// A node of the DAG before its submit file is read.
#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) line: usize,
    pub(crate) submit: String,
    /// An inline description in place of a submit file.
    pub(crate) inline: Option<String>,
    pub(crate) directory: String,
    pub(crate) is_empty: bool,
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) retries: u32,
    pub(crate) priority: i32,
    pub(crate) parents: BTreeSet<usize>,
}

/// The statements of a `.dag` file.
#[derive(Debug, Default)]
pub(crate) struct Dag {
    pub(crate) names: Vec<String>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) descriptions: BTreeMap<String, String>,
    pub(crate) remarks: Vec<String>,
}

pub(crate) fn parse_dag(text: &str) -> Result<Dag, ImportError> {
    let mut dag = Dag::default();
    let mut index = BTreeMap::new();
    let lines = join_lines(text);
    // Statements may name nodes that are declared below.
    let mut later = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let (line, text) = &lines[at];
        at += 1;
        let mut words = text.split_whitespace();
        let statement = words.next().unwrap_or_default().to_ascii_lowercase();
        let rest: Vec<&str> = words.collect();
        let is_block = rest.last() == Some(&"{");
        let block = match is_block {
            true => take_block(&lines, &mut at).ok_or_else(|| {
                ImportError::at(*line, format!("'{text}': no line with '}}' ends it"))
            })?,
            false => String::new(),
        };
        check_statement(*line, &statement)?;
        match statement.as_str() {
            "job" | "data" => {
                let node = parse_node(*line, &rest, is_block.then_some(block))?;
                if index.insert(rest[0].to_owned(), dag.nodes.len()).is_some() {
                    return Err(ImportError::at(
                        *line,
                        format!("'{}' is declared twice", rest[0]),
                    ));
                }
                dag.names.push(rest[0].to_owned());
                dag.nodes.push(node);
            }
            "submit-description" => {
                let name = rest.first().copied().unwrap_or_default();
                dag.descriptions.insert(name.to_owned(), block);
            }
            "script" => dag.remarks.push(format!(
                "line {line}: '{text}' does not run; put its work into a job, or run it by hand"
            )),
            "reject" => {
                return Err(ImportError::at(*line, "the file rejects its use (REJECT)"));
            }
            name if IGNORED_STATEMENTS.contains(&name) => {
                dag.remarks.push(format!(
                    "line {line}: {} has no effect",
                    name.to_ascii_uppercase()
                ));
            }
            "parent" | "vars" | "retry" | "priority" | "done" => {
                later.push((*line, statement, text.as_str(), rest));
            }
            _ => {
                return Err(ImportError::at(
                    *line,
                    format!("unknown statement '{text}'"),
                ));
            }
        }
    }
    for (line, statement, text, rest) in later {
        apply_statement(&mut dag, &index, line, &statement, text, &rest)?;
    }
    Ok(dag)
}

fn check_statement(line: usize, statement: &str) -> Result<(), ImportError> {
    let mut refused = REFUSED_STATEMENTS.iter();
    match refused.find(|(name, _)| *name == statement) {
        None => Ok(()),
        Some((_, why)) => {
            let name = statement.to_ascii_uppercase();
            Err(ImportError::at(
                line,
                format!("{name} is not supported: {why}"),
            ))
        }
    }
}

/// The lines of a description up to the closing brace; nothing without one.
fn take_block(lines: &[(usize, String)], at: &mut usize) -> Option<String> {
    let length = lines[*at..].iter().position(|(_, line)| line == "}")?;
    let inner = &lines[*at..*at + length];
    *at += length + 1;
    Some(inner.iter().map(|(_, line)| format!("{line}\n")).collect())
}

fn parse_node(line: usize, rest: &[&str], inline: Option<String>) -> Result<Node, ImportError> {
    let [_, submit, options @ ..] = rest else {
        return Err(ImportError::at(line, "JOB needs a name and a submit file"));
    };
    let mut node = Node {
        line,
        submit: (*submit).to_owned(),
        inline,
        ..Node::default()
    };
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match option.to_ascii_uppercase().as_str() {
            "DIR" => node.directory = options.next().copied().unwrap_or_default().to_owned(),
            "NOOP" => node.is_empty = true,
            "DONE" => {
                return Err(ImportError::at(
                    line,
                    "DONE: remove the job, its files are at home",
                ));
            }
            _ => {}
        }
    }
    Ok(node)
}

/// A statement about nodes.
fn apply_statement(
    dag: &mut Dag,
    index: &BTreeMap<String, usize>,
    line: usize,
    statement: &str,
    text: &str,
    rest: &[&str],
) -> Result<(), ImportError> {
    let count = dag.nodes.len();
    let find = |name: &str| -> Result<Vec<usize>, ImportError> {
        if name.eq_ignore_ascii_case("ALL_NODES") {
            return Ok((0..count).collect());
        }
        let unknown = || ImportError::at(line, format!("unknown job '{name}'"));
        Ok(vec![index.get(name).copied().ok_or_else(unknown)?])
    };
    if statement == "parent" {
        let split = rest
            .iter()
            .position(|word| word.eq_ignore_ascii_case("CHILD"));
        let split = split.ok_or_else(|| ImportError::at(line, "PARENT without CHILD"))?;
        for child in &rest[split + 1..] {
            for child in find(child)? {
                for parent in &rest[..split] {
                    let parents = find(parent)?;
                    dag.nodes[child]
                        .parents
                        .extend(parents.into_iter().filter(|it| *it != child));
                }
            }
        }
        return Ok(());
    }
    let named = rest.first().copied().unwrap_or_default();
    let number = || {
        let number = rest.get(1).and_then(|word| word.parse::<i32>().ok());
        number.ok_or_else(|| ImportError::at(line, format!("'{text}' lacks a number")))
    };
    for node in find(named)? {
        match statement {
            "retry" => dag.nodes[node].retries = number()?.clamp(0, 1_000).unsigned_abs(),
            "priority" => dag.nodes[node].priority = number()?.clamp(-1_000_000, 1_000_000),
            "vars" => {
                let variables = parse_variables(line, text)?;
                dag.nodes[node].variables.extend(variables);
            }
            _ => {
                return Err(ImportError::at(
                    line,
                    "DONE: remove the job, its files are at home",
                ));
            }
        }
    }
    if statement == "retry" && rest.len() > 2 {
        dag.remarks
            .push(format!("line {line}: UNLESS-EXIT has no effect"));
    }
    Ok(())
}

/// `name="value"` pairs; in a value, `\"` and `\\` stand for the second character.
fn parse_variables(line: usize, text: &str) -> Result<Vec<(String, String)>, ImportError> {
    // The statement and the job come first.
    let mut rest = text;
    for _ in 0..2 {
        rest = rest.trim_start();
        rest = &rest[rest.find(char::is_whitespace).unwrap_or(rest.len())..];
    }
    rest = rest.trim_start();
    let mut found = Vec::new();
    for word in ["PREPEND", "APPEND"] {
        rest = rest.strip_prefix(word).unwrap_or(rest).trim_start();
    }
    while !rest.is_empty() {
        let malformed = || ImportError::at(line, format!("'{rest}' is not NAME=\"VALUE\""));
        let (name, value) = rest.split_once('=').ok_or_else(malformed)?;
        let value = value.trim_start().strip_prefix('"').ok_or_else(malformed)?;
        let (mut done, mut end) = (String::new(), None);
        let mut characters = value.char_indices();
        while let Some((at, c)) = characters.next() {
            match c {
                '"' => {
                    end = Some(at);
                    break;
                }
                '\\' => done.extend(characters.next().map(|(_, c)| c)),
                c => done.push(c),
            }
        }
        let end = end.ok_or_else(malformed)?;
        found.push((name.trim().to_owned(), done));
        rest = value[end + 1..].trim_start();
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_variables_may_have_quotes() {
        let found = parse_variables(1, r#"VARS A x="a \"b\" \\c" y="2""#).expect("pairs");
        assert_eq!(found[0], ("x".to_owned(), r#"a "b" \c"#.to_owned()));
        assert_eq!(found[1], ("y".to_owned(), "2".to_owned()));
    }
}
