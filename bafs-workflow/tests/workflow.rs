//! The workflow language on valid input: what a text becomes. What it says about errors is tested
//! in `workflow_errors.rs`.

use bafs_proto::file_set::FileSelection;
use bafs_proto::volume::LimitKind;
use bafs_workflow::{
    CachePolicy, CheckedWorkflow, Diagnostic, JobIndex, Scheme, Severity, VolumeIndex, VolumeKind,
    Workflow, parse_workflow,
};

fn reject_description_files(name: &str) -> Result<String, String> {
    Err(format!("no file {name} in this test"))
}

fn check_text(text: &str) -> CheckedWorkflow {
    parse_workflow("dir/test.bafs", text, &reject_description_files)
        .unwrap_or_else(|e| panic!("{e}"))
}

fn parse_text(text: &str) -> Workflow {
    check_text(text).workflow
}

fn job_names(workflow: &Workflow) -> Vec<&str> {
    workflow.jobs.iter().map(|job| job.name.as_str()).collect()
}

/// The sample of the language's first publication, NSDI 2004.
const PAPER_SAMPLE: &str = "\
job     a a.job                      # a name and its description file
job     b b.job
parent  a child b                    # order
volume  b1 ftp://home/mydata 1 GB    # cache volume: a source URL and a size
volume  p1 scratch 50 MB             # empty scratch volume
mount   b1 a /mydata                 # volume, job, path in the job's name space
mount   p1 a /tmp
mount   p1 b /tmp
extract p1 x ftp://home/out.1        # file x of p1 is committed to home, uniquely named
";

#[test]
fn the_published_sample_is_unchanged() {
    let read = |name: &str| match name {
        "flows/a.job" => Ok("executable = /bin/a\narguments = -in /mydata/x".to_owned()),
        "flows/b.job" => Ok("executable = /bin/b\r\nqueue\r\n".to_owned()),
        _ => Err(format!("unexpected {name}")),
    };
    let CheckedWorkflow {
        workflow, warnings, ..
    } = parse_workflow("flows/nsdi.bafs", PAPER_SAMPLE, &read).unwrap();
    assert_eq!(warnings.len(), 1, "only 'queue' is worth a warning");
    assert_eq!(workflow.name, "nsdi");
    assert_eq!(job_names(&workflow), ["a", "b"]);
    let [a, b] = [&workflow.jobs[0], &workflow.jobs[1]];
    assert_eq!(
        (a.children.as_slice(), b.parents.as_slice()),
        (&[JobIndex(1)][..], &[JobIndex(0)][..])
    );
    assert_eq!(a.command.executable, "/bin/a");
    assert_eq!(a.command.arguments, ["-in", "/mydata/x"]);
    assert_eq!(a.command.directory, "/tmp");
    assert_eq!(
        (a.cpus, a.memory_bytes, a.runtime_s, a.retries),
        (1, 0, None, 0)
    );
    let mounts: Vec<_> = a
        .mounts
        .iter()
        .map(|m| (m.volume.0, &*m.path, m.writable))
        .collect();
    assert_eq!(mounts, [(0, "/mydata", false), (1, "/tmp", true)]);
    let [b1, p1] = [&workflow.volumes[0], &workflow.volumes[1]];
    let VolumeKind::Cache { source, policy, .. } = &b1.kind else {
        panic!("{b1:?}")
    };
    assert_eq!(
        (source.scheme, &*source.host, &*source.path),
        (Scheme::Ftp, "home", "/mydata")
    );
    assert_eq!(
        (*policy, b1.size_bytes, b1.size_files),
        (CachePolicy::Lru, 1_000_000_000, 61_035)
    );
    assert_eq!(p1.kind, VolumeKind::Scratch { fill: None });
    assert_eq!((p1.size_bytes, p1.size_files), (50_000_000, 3_051));
    assert_eq!(p1.users, [JobIndex(0), JobIndex(1)]);
    let extract = &workflow.extracts[0];
    assert_eq!((extract.volume, &*extract.path), (VolumeIndex(1), "x"));
    assert_eq!(extract.target.to_string(), "ftp://home/out.1");
}

#[test]
fn extracts_of_directories_and_patterns_are_sets() {
    let text = "volume w scratch 1 MB\njob a {\nexecutable = x\n}\nmount w a /w\n\
        extract w *.bam 'a*b' res//deep/ bafs://h/out/\nextract w one bafs://h/one\n\
        extract w 'x*' bafs://h/x\nextract w ./ bafs://h/all/\n";
    let workflow = parse_text(text);
    let [set, one, quoted, all] = workflow.extracts.as_slice() else {
        panic!("{:?}", workflow.extracts)
    };
    let selections = [
        FileSelection::Pattern("*.bam".to_owned()),
        FileSelection::File("a*b".to_owned()),
        FileSelection::Directory("res/deep".to_owned()),
    ];
    assert_eq!(set.selections, selections);
    assert_eq!(set.path, "*.bam a*b res/deep/");
    assert_eq!(set.target.to_string(), "bafs://h/out");
    assert!(!one.is_set() && !quoted.is_set());
    assert_eq!(quoted.path, "x*");
    assert_eq!(all.selections, [FileSelection::Directory(String::new())]);
}

#[test]
fn a_watched_volume_has_its_margin_reserved() {
    let text = "volume w scratch 100 GB files 1000000 watched\nvolume small scratch 1 MB watched\n\
        job a {\nexecutable = x\n}\nmount w a /w\nmount small a /small";
    let workflow = parse_text(text);
    let found = workflow.volumes.iter();
    let found: Vec<_> = found
        .map(|volume| (volume.limit, volume.size_bytes, volume.size_files))
        .collect();
    let small = 1_000_000 + (64 << 20);
    let expected = [
        (LimitKind::Watched, 110_000_000_000, 1_100_000),
        (LimitKind::Watched, small, 1_024 + 10_000),
    ];
    assert_eq!(found, expected);
}

#[test]
fn large_volumes_are_watched_unless_declared_exact() {
    let text = "volume large scratch 10 GB\nvolume exact scratch 10 GB exact\n\
        volume small scratch 600 MB\nvolume few scratch 10 GB files 1000\n\
        volume any scratch unknown\nvolume seen cache file:///a 10 GB\n\
        job a {\nexecutable = x\n}\nmount large a /l\nmount exact a /e\nmount small a /s\n\
        mount few a /f\nmount any a /u\nmount seen a /c ro";
    let workflow = parse_text(text);
    let found = workflow.volumes.iter();
    let found: Vec<_> = found
        .map(|volume| (&*volume.name, volume.limit, volume.size_bytes))
        .collect();
    let expected = [
        ("large", LimitKind::Watched, 11_000_000_000),
        ("exact", LimitKind::Exact, 10_000_000_000),
        ("small", LimitKind::Exact, 600_000_000),
        ("few", LimitKind::Exact, 10_000_000_000),
        ("any", LimitKind::Exact, 0),
        ("seen", LimitKind::Exact, 10_000_000_000),
    ];
    assert_eq!(found, expected);
}

#[test]
fn mount_option_selects_write_back() {
    let text = "volume v scratch 1 MB\nvolume w scratch 1 MB\nvolume u scratch 1 MB from file:///a\n\
        job a {\nexecutable = x\n}\nmount v a /v Write-Back\nmount w a /w rw\nmount u a /u ro";
    let workflow = parse_text(text);
    let found = workflow.jobs[0].mounts.iter();
    let found: Vec<_> = found
        .map(|mount| (&*mount.path, mount.writable, mount.write_back))
        .collect();
    let expected = [
        ("/u", false, false),
        ("/v", true, true),
        ("/w", true, false),
    ];
    assert_eq!(found, expected);
}

const FULL_LANGUAGE_SAMPLE: &str = r#"
volume in scratch 10MB files 7 from bafs://home:9000/in//x/   # filled
volume db cache s3://bucket/db 3.5TB mru warm files 9
volume db2 https://h/db?v=1 1.5 GiB lru
volume out scratch 3500GB exact
job a {
    executable     = ./blastp        # a comment
    arguments      = -db '/data/my db' -evalue "1e-\"5\"" \
                     -fmt 6 '' a=b #x
    environment    = A=1 B="x y" C=
    request_cpus   = 4
    request_memory = 1.5 GB, 6GB
    request_disk = 20 GB
    max_runtime = 3 h
    runtime        = 2 h
    directory      = /out/w
    output         = log/stdout
    ERROR          = /out/stderr
    retry          = 2
}
mount in a /in ro
mount db a "/the data"
mount db2 a /db2 RO
mount out a /out rw
extract out w/log/stdout FILE:///results/./a
"#;

#[test]
fn every_key_and_option_is_parsed() {
    let workflow = parse_text(FULL_LANGUAGE_SAMPLE);
    let job = &workflow.jobs[0];
    assert_eq!(job.command.executable, "./blastp");
    let arguments = [
        "-db",
        "/data/my db",
        "-evalue",
        "1e-\"5\"",
        "-fmt",
        "6",
        "",
        "a=b",
    ];
    assert_eq!(job.command.arguments, arguments);
    let environment = [("A", "1"), ("B", "x y"), ("C", "")];
    assert_eq!(
        job.command.environment,
        environment.map(|(n, v)| (n.to_owned(), v.to_owned()))
    );
    assert_eq!((job.cpus, job.memory_bytes), (4, 1_500_000_000));
    let memory = [0, 1, 2].map(|tries| job.memory_of_try(tries));
    assert_eq!(memory, [1_500_000_000, 6_000_000_000, 6_000_000_000]);
    assert_eq!(job.limits.temporary_bytes, Some(20_000_000_000));
    assert_eq!(job.limits.runtime_s, Some(10_800));
    assert_eq!((job.runtime_s, job.retries), (Some(7_200), 2));
    assert_eq!(job.command.directory, "/out/w");
    assert_eq!(job.command.stdout.as_deref(), Some("/out/w/log/stdout"));
    assert_eq!(job.command.stderr.as_deref(), Some("/out/stderr"));
    let paths: Vec<_> = job.mounts.iter().map(|m| (&*m.path, m.writable)).collect();
    assert_eq!(
        paths,
        [
            ("/db2", false),
            ("/in", false),
            ("/out", true),
            ("/the data", false)
        ]
    );
    let sizes: Vec<_> = workflow.volumes.iter().map(|v| v.size_bytes).collect();
    assert_eq!(
        sizes,
        [
            10_000_000,
            3_500_000_000_000,
            1_610_612_736,
            3_500_000_000_000
        ]
    );
    assert_eq!(
        (
            workflow.volumes[0].size_files,
            workflow.volumes[1].size_files
        ),
        (7, 9)
    );
    let VolumeKind::Scratch { fill: Some(fill) } = &workflow.volumes[0].kind else {
        panic!()
    };
    assert_eq!(fill.to_string(), "bafs://home:9000/in/x");
    let cache = |at: usize| match workflow.volumes[at].kind {
        VolumeKind::Cache {
            policy, is_warmed, ..
        } => (policy, is_warmed),
        VolumeKind::Scratch { .. } => panic!("volume {at} is a cache"),
    };
    let declared = [(CachePolicy::Mru, true), (CachePolicy::Lru, false)];
    assert_eq!([cache(1), cache(2)], declared);
    assert_eq!(workflow.extracts[0].target.to_string(), "file:///results/a");
}

#[test]
fn loops_expand_in_order() {
    let workflow = parse_text(
        "
for x in p 'q'
  for i in 9..11
    job $(x)$(i:03)
    {
      executable = run$(i)
      arguments  = '$(x) of $(i)' $$(date) \\$(x)
    }
  end
end
for n in 1..2 x 3..3
  job n$(n) {
    executable = true
  }
end
",
    );
    let expected = [
        "p009", "p010", "p011", "q009", "q010", "q011", "n1", "n2", "nx", "n3",
    ];
    assert_eq!(job_names(&workflow), expected);
    assert_eq!(workflow.jobs[4].command.executable, "run10");
    assert_eq!(
        workflow.jobs[4].command.arguments,
        ["q of 10", "$(date)", "$(x)"]
    );
}

#[test]
fn loop_variables_reach_description_files_and_bounds() {
    let text = "for i in 1..3\nfor j in 1..$(i)\njob a$(i).$(j) common.job\nend\nend\n";
    let reads = std::cell::Cell::new(0);
    let read = |name: &str| {
        assert_eq!(name, "/flows/common.job");
        reads.set(reads.get() + 1);
        Ok("executable = run\narguments = $(i) $(j:02)".to_owned())
    };
    let workflow = parse_workflow("/flows/t.bafs", text, &read)
        .unwrap()
        .workflow;
    assert_eq!(
        job_names(&workflow),
        ["a1.1", "a2.1", "a2.2", "a3.1", "a3.2", "a3.3"]
    );
    assert_eq!(workflow.jobs[4].command.arguments, ["3", "02"]);
    assert_eq!(reads.get(), 1, "a description is read once");
}

#[test]
fn order_of_statements_does_not_matter() {
    let job = "job b {\nexecutable = true\n}\njob a {\nexecutable = true\n}\n";
    let volume = "volume v scratch 1 MB\n";
    let rest = "mount v a /w\nmount v b /w\nparent a child b\nretry b 3\nextract v x bafs://h/x\n";
    let first = parse_text(&format!("{job}{volume}{rest}"));
    assert_eq!(first, parse_text(&format!("{rest}{volume}{job}")));
    assert_eq!(first.topological_order(), [JobIndex(1), JobIndex(0)]);
    assert_eq!(first.jobs[0].retries, 3);
}

#[test]
fn default_directory_is_the_jobs_scratch_volume() {
    let text = "
volume c bafs://h/c 1 MB
volume s scratch 1 MB from bafs://h/s
volume w scratch 1 MB
for j in none cache read write
  job $(j) {
    executable = true
  }
  mount c cache /c$(j)
end
mount s read /s ro
mount s write /s ro
mount w write /w
";
    let directories: Vec<String> = parse_text(text)
        .jobs
        .into_iter()
        .map(|job| job.command.directory)
        .collect();
    assert_eq!(directories, ["/", "/", "/s", "/w"]);
}

#[test]
fn topological_order_prefers_declaration_order() {
    let mut text = String::new();
    for name in ["e", "d", "c", "b", "a"] {
        text += &format!("job {name} {{\nexecutable = true\n}}\n");
    }
    text += "parent a child e\nparent b child d\nparent b child d\n";
    let workflow = parse_text(&text);
    let order: Vec<&str> = workflow
        .topological_order()
        .into_iter()
        .map(|job| &*workflow.job(job).name)
        .collect();
    assert_eq!(order, ["c", "b", "d", "a", "e"]);
    assert_eq!(
        workflow.jobs[3].children,
        [JobIndex(1)],
        "a pair counts once"
    );
}

#[test]
fn workflow_round_trips_through_json() {
    let workflow = parse_text(
        "volume v scratch 1 MB from bafs://h/x\nvolume c bafs://h/y 1 KiB mru\n\
         job a {\nexecutable = true\n}\nmount v a /v\nmount c a /c\nextract v x s3://b/x\n",
    );
    let json = serde_json::to_string(&workflow).unwrap();
    assert_eq!(serde_json::from_str::<Workflow>(&json).unwrap(), workflow);
}

#[test]
fn diagnostics_show_their_line() {
    let text = "job a {\n\texecutable = true\n}\n\tmount p9 a /w\n";
    let rejected = parse_workflow("blast.bafs", text, &reject_description_files).unwrap_err();
    let [diagnostic] = rejected.diagnostics.as_slice() else {
        panic!("{rejected}")
    };
    assert_eq!(diagnostic.severity, Severity::Error);
    assert_eq!(
        diagnostic.with_source(text),
        "blast.bafs:4:8: error: unknown volume 'p9'\n \
         4 | \tmount p9 a /w\n   | \t      ^\n  \
         hint: declare it with 'volume NAME scratch SIZE'"
    );
    let far = format!("{}x é", " ".repeat(500));
    let diagnostic = Diagnostic {
        line: 1,
        column: 503,
        ..diagnostic.clone()
    };
    let shown = diagnostic.with_source(&far);
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(
        lines[1].chars().count(),
        lines[2].chars().count(),
        "{shown}"
    );
    assert!(
        lines[1].ends_with("x é") && lines[2].ends_with('^'),
        "{shown}"
    );
    let outside = Diagnostic {
        line: 99,
        ..diagnostic
    };
    assert_eq!(outside.with_source(text), outside.to_string());
}

#[test]
fn diagnostics_escape_and_shorten_hostile_text() {
    let long = "x".repeat(10_000);
    let text = format!("'\u{1b}[31mred' a\n{long} b\n");
    let rejected = parse_workflow("t.bafs", &text, &reject_description_files).unwrap_err();
    let shown = rejected.to_string();
    assert!(!shown.contains('\u{1b}') && shown.len() < 2_000, "{shown}");
}

#[test]
fn the_documented_and_the_shipped_example_are_valid() {
    let document = include_str!("../../docs/reference/workflow.md");
    let example = document
        .split("```bafs\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let mut documented = check_text(example.unwrap());
    // What is documented as accepted may be shown, though it is warned of.
    let warnings = &mut documented.warnings;
    warnings.retain(|warning| !warning.message.contains("has no effect"));
    assert_eq!(
        (documented.workflow.jobs.len(), documented.warnings),
        (6, vec![])
    );
    let shipped = check_text(include_str!("../../examples/blast/blast.bafs"));
    assert_eq!(
        (shipped.workflow.jobs.len(), shipped.warnings),
        (32, vec![])
    );
}

#[test]
fn job_argument_limits_match_linux() {
    let with = |arguments: &str, variable: &str| {
        let text = format!(
            "volume v scratch 1 MB\nmount v j /v\njob j {{\nexecutable = /bin/sh\n\
             arguments = {arguments}\nenvironment = NAME={variable}\n}}\n"
        );
        match parse_workflow("t.bafs", &text, &reject_description_files) {
            Ok(checked) => (true, format!("{:?}", checked.warnings)),
            Err(rejected) => (false, rejected.to_string()),
        }
    };
    let word = |bytes| "x".repeat(bytes);
    let words = |count| vec![word(1_000); count].join(" ");
    for (arguments, variable, is_taken, says) in [
        (words(1_900), word(50_000), true, ""),
        (word((128 << 10) - 1), word(1), true, ""),
        (word(128 << 10), word(1), false, "131072 bytes"),
        (word(1), word((128 << 10) - 6), true, ""),
        (word(1), word((128 << 10) - 5), false, "131072 bytes"),
        (words(2_100), word(1), true, "commonly takes 2097152"),
        (words(4_200), word(1), false, "may have 4194304"),
    ] {
        let (taken, said) = with(&arguments, &variable);
        assert_eq!(taken, is_taken, "{} bytes: {said}", arguments.len());
        assert!(said.contains(says), "{said}");
        assert_eq!(
            said.contains("file of a volume"),
            !says.is_empty(),
            "{said}"
        );
    }
}

#[test]
fn jobs_share_directories_of_the_host() {
    let text = "job a {\nexecutable = x\nshare = /var/tmp\n}\njob b {\nexecutable = x\n}\n\
                job c {\nexecutable = x\n}\nshare /tmp a b\nshare /tmp/ a\nshare /dev/shm b\n";
    let jobs = parse_text(text).jobs;
    assert_eq!(jobs[0].command.shared_directories, ["/tmp", "/var/tmp"]);
    assert_eq!(jobs[1].command.shared_directories, ["/dev/shm", "/tmp"]);
    assert!(jobs[2].command.shared_directories.is_empty());
}
