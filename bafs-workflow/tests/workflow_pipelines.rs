//! What pipelines need of the language: scripts, lists, functions, templates, includes, files of
//! jobs. Each test has its files in memory.

use std::cell::RefCell;
use std::collections::BTreeMap;

use bafs_workflow::{
    Job, ListedEntry, Sources, VolumeKind, Workflow, WorkflowRejected, format_workflow,
    parse_workflow_with,
};

/// Files by their path, and what was asked for.
#[derive(Default)]
struct MemoryFiles {
    files: BTreeMap<&'static str, &'static str>,
    asked: RefCell<Vec<String>>,
}

impl Sources for MemoryFiles {
    fn read(&self, path: &str, _bytes_max: usize) -> Result<String, String> {
        self.asked.borrow_mut().push(path.to_owned());
        let text = self.files.get(path).map(|text| (*text).to_owned());
        text.ok_or_else(|| format!("no {path}"))
    }

    fn list(
        &self,
        directory: &str,
        depth_max: usize,
        _enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        self.asked
            .borrow_mut()
            .push(format!("{directory}:{depth_max}"));
        let below = self
            .files
            .keys()
            .filter_map(|name| name.strip_prefix(directory));
        let entries = below.map(|path| ListedEntry {
            path: path.to_owned(),
            is_directory: false,
        });
        // In no particular order, which must not matter.
        Ok(entries.rev().collect())
    }
}

fn files(files: &[(&'static str, &'static str)]) -> MemoryFiles {
    MemoryFiles {
        files: files.iter().copied().collect(),
        asked: RefCell::default(),
    }
}

fn parse_with(text: &str, files: &MemoryFiles) -> Result<Workflow, WorkflowRejected> {
    parse_workflow_with("dir/w.bafs", text, files).map(|checked| checked.workflow)
}

fn parse(text: &str) -> Workflow {
    parse_with(text, &MemoryFiles::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn command(job: &Job) -> Vec<&str> {
    let arguments = job.command.arguments.iter().map(String::as_str);
    std::iter::once(job.command.executable.as_str())
        .chain(arguments)
        .collect()
}

fn job_names(workflow: &Workflow) -> Vec<&str> {
    workflow.jobs.iter().map(|job| job.name.as_str()).collect()
}

#[test]
fn script_lines_become_a_shell_command() {
    let text = "for s in A\njob a$(s) {\n  script = <<END\n    x=$(s)\n    \
                echo \"$x\" $(date) $((1 + 2)) $${y} $$(s)\n  END\n  \
                arguments = one 'two three'\n}\nend\n";
    let workflow = parse(text);
    assert_eq!(
        command(&workflow.jobs[0]),
        [
            "sh",
            "-eu",
            "-c",
            "x=A\necho \"$x\" $(date) $((1 + 2)) $${y} $(s)\n",
            "aA",
            "one",
            "two three"
        ]
    );
}

#[test]
fn quoted_script_ends_keep_variables() {
    let text = "for s in A\njob a$(s) {\nscript = <<'END'\necho $(s)\nEND\n}\nend\n";
    assert_eq!(command(&parse(text).jobs[0])[3], "echo $(s)\n");
}

#[test]
fn shells_take_the_script_itself() {
    let text = "job a {\ninterpreter = /bin/bash -o pipefail\nscript = <<E\ntrue\nE\n}\n\
                job b {\nscript = <<E\n#!/usr/bin/env bash\ntrue\nE\n}\n";
    let workflow = parse(text);
    assert_eq!(
        command(&workflow.jobs[0]),
        ["/bin/bash", "-o", "pipefail", "-c", "true\n", "a"]
    );
    assert_eq!(
        command(&workflow.jobs[1])[..3],
        ["/usr/bin/env", "bash", "-c"]
    );
}

#[test]
fn other_interpreters_get_a_file() {
    let script = "interpreter = python3 -u 'x y'\narguments = 5\nscript = <<E\nprint(1)\nE\n";
    let text = format!("job a {{\n{script}}}\nvolume v scratch 1 MB\nmount v a /tmp\n");
    let workflow = parse(&text);
    let launcher = "printf %s \"$1\" >/var/tmp/bafs-script || exit; shift; \
                    exec python3 -u 'x y' /var/tmp/bafs-script \"$@\"";
    assert_eq!(
        command(&workflow.jobs[0]),
        ["/bin/sh", "-c", launcher, "a", "print(1)\n", "5"]
    );
    let shared = "share /tmp a\nshare /dev/shm a\nmount v a /var\nvolume v scratch 1 MB\n";
    let refused = parse_with(&format!("job a {{\n{script}}}\n{shared}"), &files(&[]));
    let said = refused.expect_err("no directory is left").to_string();
    assert!(said.contains("no private directory"), "{said}");
}

#[test]
fn loops_go_through_lines_of_a_file() {
    let files = files(&[
        ("dir/s.txt", "# samples\nA\n\n  B \r\n"),
        ("/abs.txt", "C\n"),
    ]);
    let text = "for s in lines(\"s.txt\") D lines(/abs.txt)\nfor t in lines(s.txt)\n\
                job $(s)$(t) {\nexecutable = x\n}\nend\nend\n";
    let workflow = parse_with(text, &files).expect("it is right");
    assert_eq!(
        job_names(&workflow),
        ["AA", "AB", "BA", "BB", "DA", "DB", "CA", "CB"]
    );
    assert_eq!(*files.asked.borrow(), ["dir/s.txt", "/abs.txt"]);
}

#[test]
fn rows_of_tables_have_columns() {
    let files = files(&[("dir/s.tsv", "sample\treads\nA\tbafs://home/a.fq\nB\t12\n")]);
    let text = "for row in table(\"s.tsv\")\njob $(row.sample) {\nexecutable = x\n\
                arguments = $(row.reads) \"$(stem(row.reads))\" $(row.sample)\n\
                environment = S=$(row.sample)\n}\nend\n";
    let workflow = parse_with(text, &files).expect("it is right");
    assert_eq!(job_names(&workflow), ["A", "B"]);
    assert_eq!(
        command(&workflow.jobs[0]),
        ["x", "bafs://home/a.fq", "a", "A"]
    );
    let wrong = text.replace("row.reads))", "row.read))");
    let said = parse_with(&wrong, &files)
        .expect_err("no column")
        .to_string();
    assert!(said.contains("did you mean 'reads'?"), "{said}");
}

#[test]
fn globs_of_homes_match_in_order() {
    let files = files(&[
        ("bafs://home/reads/b_1.fq", ""),
        ("bafs://home/reads/a_1.fq", ""),
        ("bafs://home/reads/a_2.fq", ""),
        ("dir/local/x.txt", ""),
    ]);
    let text = "for s in glob(\"bafs://home/reads/*_1.fq\") glob(local/*)\n\
                job j-$(remove_suffix(basename(s), \"_1.fq\")) {\nexecutable = x\n\
                arguments = $(replace(s, \"_1\", \"_2\"))\n}\nend\n\
                volume v cache bafs://home/reads 1 MB\nmount v j-a /r\n";
    let workflow = parse_with(text, &files).expect("it is right");
    assert_eq!(job_names(&workflow), ["j-a", "j-b", "j-x.txt"]);
    let read: Vec<_> = workflow.jobs.iter().map(|job| command(job)[1]).collect();
    let expected = [
        "bafs://home/reads/a_2.fq",
        "bafs://home/reads/b_2.fq",
        "local/x.txt",
    ];
    assert_eq!(read, expected);
    assert_eq!(
        *files.asked.borrow(),
        ["bafs://home/reads/:1", "dir/local/:1"]
    );
}

#[test]
fn templates_fill_in_their_parameters() {
    let text = "template align sample threads=4 {\nexecutable = bwa\n\
                arguments = -t $(threads) $(sample).fq $(i)\n\
                request_cpus = $(threads)\nretry = 1\n}\n\
                for i in 1..2\njob a$(i) from align sample=s$(i:02)\nend\n\
                for i in 7\njob b from align sample=\"x y\" threads=2\n{\nretry = 3\n}\n\
                job c from align sample=z {\nscript = <<E\necho $(sample)\nE\n}\nend\n";
    let workflow = parse(text);
    assert_eq!(job_names(&workflow), ["a1", "a2", "b", "c"]);
    assert_eq!(
        command(&workflow.jobs[1]),
        ["bwa", "-t", "4", "s02.fq", "2"]
    );
    let b = &workflow.jobs[2];
    assert_eq!(command(b), ["bwa", "-t", "2", "x y.fq", "7"]);
    assert_eq!((b.cpus, b.retries), (2, 3));
    assert_eq!(
        command(&workflow.jobs[3])[..4],
        ["sh", "-eu", "-c", "echo z\n"]
    );
}

#[test]
fn includes_are_relative_to_their_file() {
    let files = files(&[
        (
            "dir/parts/a.bafs",
            "template t x {\nexecutable = $(x)\n}\ninclude b.bafs\n",
        ),
        (
            "dir/parts/b.bafs",
            "job b b.job\nfor l in lines(l.txt)\njob $(l) from t x=$(l)\nend\n",
        ),
        ("dir/parts/b.job", "executable = y\n"),
        ("dir/parts/l.txt", "one\n"),
        ("dir/each.bafs", "job e$(i) from t x=z\n"),
    ]);
    let text = "include parts/a.bafs\nfor i in 1..2\ninclude \"each.bafs\"\nend\n";
    let workflow = parse_with(text, &files).expect("it is right");
    assert_eq!(job_names(&workflow), ["b", "one", "e1", "e2"]);
    assert_eq!(files.asked.borrow().len(), 5, "each is read once");
}

#[test]
fn errors_of_includes_name_their_file() {
    let files = files(&[(
        "dir/a.bafs",
        "job a {\nexecutable = x\nruntime = 5 mim\n}\n",
    )]);
    let said = parse_with("include a.bafs\n", &files)
        .expect_err("a slip")
        .to_string();
    assert!(said.starts_with("dir/a.bafs:3:11: error"), "{said}");
}

#[test]
fn job_files_are_absolute_paths() {
    let text = "volume v scratch 1 MB from bafs://home/in\nmount v a /w\n\
                job a {\nexecutable = x\nrequires = in.txt /etc/passwd\n\
                produces = out/a.bam /w/b\n}\n";
    let workflow = parse(text);
    let command = &workflow.jobs[0].command;
    assert_eq!(command.required_files, ["/w/in.txt", "/etc/passwd"]);
    assert_eq!(command.produced_files, ["/w/out/a.bam", "/w/b"]);
    let VolumeKind::Scratch { fill: Some(_) } = &workflow.volumes[0].kind else {
        panic!("{workflow:?}")
    };
}

#[test]
fn quoted_words_of_loops_are_no_lists() {
    let text = "for s in 'lines(x)' lines\njob a {\nexecutable = $(s)\n}\nend\n";
    let said = parse_with(text, &files(&[]))
        .expect_err("two jobs of one name")
        .to_string();
    assert!(said.contains("declared twice"), "{said}");
}

/// The examples of the reference and of `examples/`, each with the files that it names.
fn shown_workflows() -> Vec<(&'static str, MemoryFiles)> {
    let document = include_str!("../../docs/reference/workflow.md");
    let blocks = document.split("```bafs\n").skip(1);
    let mut shown: Vec<_> = blocks
        .filter_map(|rest| rest.split("```").next())
        .map(|text| {
            let rows = "sample\treads\tlane\nA\tbafs://home/a.fq\t1\n";
            (text, files(&[("dir/samples.tsv", rows)]))
        })
        .collect();
    let rows = "sample\tfile\tgroup\nA\ta.fq\tg\n";
    let templates = include_str!("../../examples/samples/templates.bafs");
    for text in [
        include_str!("../../examples/samples/samples.bafs"),
        include_str!("../../examples/bwa/bwa.bafs"),
        include_str!("../../examples/hmmer/hmmer.bafs"),
        include_str!("../../examples/sweep/sweep.bafs"),
        include_str!("../../examples/chain/chain.bafs"),
    ] {
        let named = [("dir/samples.tsv", rows), ("dir/templates.bafs", templates)];
        shown.push((text, files(&named)));
    }
    shown
}

#[test]
fn formatting_changes_no_meaning() {
    let shown = shown_workflows();
    assert!(shown.len() >= 12, "{} workflows", shown.len());
    for (text, files) in shown {
        let expected = parse_with(text, &files).unwrap_or_else(|error| panic!("{error}:\n{text}"));
        let formatted = format_workflow("w.bafs", text).expect("it is right");
        let again = format_workflow("w.bafs", &formatted).expect("it is right");
        assert_eq!(formatted, again);
        let parsed = parse_with(&formatted, &files).unwrap_or_else(|e| panic!("{e}:\n{formatted}"));
        assert_eq!(parsed, expected, "{formatted}");
    }
}
