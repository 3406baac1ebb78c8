//! Changes of descriptions, sources and results that make jobs run again.

use super::*;

#[test]
fn changed_size_runs_its_writer_and_successors() {
    let mut state = EarlierState::after_success();
    let name = state.workflow.volumes[1].name.clone();
    assert_eq!(name, "aligned1");
    for (bytes, files) in [(2, 1), (1, 2)] {
        let mut state = state.clone();
        state.workflow.volumes[1].size_bytes *= bytes;
        state.workflow.volumes[1].size_files *= files;
        let expected = [
            "align1: the declared size of its volume aligned1 changed",
            "sort1: job align1 runs again",
        ];
        assert_eq!(state.running(), expected);
    }
    // What `bafs sizes` proposes is a size for one that was unknown.
    let record = state.records.get_mut("align1").expect("it ran");
    record.sizes[0].bytes = 0;
    assert_eq!(state.running(), [""; 0]);
    // An older version noted none.
    let record = state.records.get_mut("align1").expect("it ran");
    record.sizes.clear();
    assert_eq!(state.running(), [""; 0]);
}

#[test]
fn volumes_swapped_between_mounts_run_their_reader() {
    let text = |first: &str, second: &str| {
        parse(&format!(
            "volume v1 scratch 1 MB\nvolume v2 scratch 1 MB\nvolume out scratch 1 MB\n\
             job p {{\nexecutable = p\n}}\njob q {{\nexecutable = q\n}}\n\
             job c {{\nexecutable = c\n}}\nparent p q child c\n\
             mount v1 p /out\nmount v2 q /out\nmount {first} c /tumour ro\n\
             mount {second} c /normal ro\nmount out c /out\n"
        ))
    };
    let mut state = EarlierState::after_success();
    state.workflow = text("v1", "v2");
    for (job, producers) in [
        ("p", vec![]),
        ("q", vec![]),
        ("c", vec![("p", 1), ("q", 1)]),
    ] {
        state.record(job, 1, Vec::new(), &producers, &[]);
    }
    assert_eq!(state.running(), [""; 0]);
    state.workflow = text("v2", "v1");
    let running = state.running();
    assert!(running.contains(&"c: its description changed".to_owned()));
    // Another name of a volume is no change.
    state.workflow = text("v1", "v2");
    state.workflow.volumes[0].name = "other".to_owned();
    assert_eq!(state.running(), [""; 0]);
}

#[test]
fn link_that_leads_out_of_its_source_is_no_known_input() {
    let link = |path: &str, target: &str| SourceEntry {
        kind: SourceKind::Symlink(target.as_bytes().to_vec()),
        ..file(path, 10)
    };
    for (target, is_out) in [
        ("/data/1.fq", true),
        ("../raw/1.fq", true),
        ("a/../../1.fq", true),
        ("a/../2.fq", false),
        ("2.fq", false),
    ] {
        let mut state = EarlierState::after_success();
        // Nobody looked at the second.
        let all = [link("1.fq", target), link("3.fq", "/data/3.fq")];
        state.list_reads(&[all[0].clone(), file("2.fq", 10), all[1].clone()]);
        let expected = "align1: its input bafs://home/reads cannot be compared: '1.fq' is a link \
                        that leads out of it";
        let running = state.running();
        assert_eq!(running.iter().any(|it| it == expected), is_out, "{target}");
        assert_eq!(running.is_empty(), !is_out, "{target}");
    }
}

#[test]
fn changed_file_of_a_set_is_named() {
    let mut state = EarlierState::after_success();
    let changed = FoundResult::SetChanged("a/1.bam".to_owned());
    let target = url("bafs://home/out/2");
    state.home.results.insert(target, changed);
    let last = "sort2: its result bafs://home/out/2/a/1.bam changed at home";
    assert_eq!(state.running()[1], last);
}

#[test]
fn source_of_one_file_is_compared_under_its_name() {
    let mut state = EarlierState::after_success();
    let shown = [file("reads", 10)];
    for job in ["align1", "align2"] {
        let record = state.records.get_mut(job).expect("it ran");
        record.sources[0].seen = SeenSource::Exactly(Box::new(ObservedInputs {
            files: vec![("reads".to_owned(), identity(10))],
            directories: vec![String::new()],
            missing: vec!["reads.gz".to_owned()],
            listed: vec![(String::new(), directory_digest(shown.iter()))],
        }));
    }
    let mut list = |size| {
        let listing = SourceState::Listed(SourceListing::new(vec![file("", size)]));
        state.home.sources.insert(url("bafs://home/reads"), listing);
        state.running()
    };
    assert_eq!(list(10), [""; 0]);
    assert_eq!(list(11)[0], "align1: its input bafs://home/reads changed");
}

#[test]
fn directory_that_opens_is_a_changed_input() {
    let mut state = EarlierState::after_success();
    let directory = |kind| SourceEntry {
        kind,
        ..file("d", 0)
    };
    for job in ["align1", "align2"] {
        let record = state.records.get_mut(job).expect("it ran");
        record.sources[0].seen = SeenSource::Exactly(Box::new(ObservedInputs {
            directories: vec!["d".to_owned()],
            listed: vec![("d".to_owned(), unreadable_directory_digest())],
            ..ObservedInputs::default()
        }));
    }
    state.list_reads(&[directory(SourceKind::UnreadableDirectory)]);
    assert_eq!(state.running(), [""; 0]);
    let changed = "align1: its input bafs://home/reads/d changed";
    state.list_reads(&[directory(SourceKind::Directory), file("d/x", 10)]);
    assert_eq!(state.running()[0], changed);
    state.list_reads(&[directory(SourceKind::Directory)]);
    assert_eq!(
        state.running()[0],
        changed,
        "it is empty, and can be listed"
    );
}

#[test]
fn changed_program_runs_its_job() {
    let mut state = EarlierState::after_success();
    let program = |size, ctime_ns| ProgramIdentity {
        path: "/bin/sort".to_owned(),
        size,
        mtime_ns: 1,
        ctime_ns,
    };
    let expected = [
        "align1: job sort1 needs its volume aligned1, which is gone",
        "sort1: its program /bin/sort changed",
    ];
    state.records.get_mut("sort1").expect("it ran").program = Some(program(1, 5));
    for (size, ctime_ns, is_same) in [(1, 5, true), (2, 5, false), (1, 6, false), (1, 0, true)] {
        let found = program(size, ctime_ns);
        state.home.programs.insert(JobIndex(1), found);
        let wanted: &[&str] = if is_same { &[] } else { &expected };
        assert_eq!(state.running(), wanted, "size {size}, change {ctime_ns}");
    }
}

#[test]
fn changed_file_of_arguments_runs_its_job() {
    let mut state = EarlierState::after_success();
    let files = |names: &[(&str, u64)]| {
        let files = names.iter().map(|(path, size)| ProgramIdentity {
            path: (*path).to_owned(),
            size: *size,
            mtime_ns: 1,
            ctime_ns: 1,
        });
        NamedFiles(files.collect())
    };
    let script = "/home/me/sort.py";
    state.records.get_mut("sort1").expect("it ran").files = files(&[(script, 3)]);
    let mut run_with = |found| {
        state.home.files.insert(JobIndex(1), found);
        state.running()
    };
    // The job itself may have made another one that it names.
    assert_eq!(run_with(files(&[(script, 3), ("/data/out", 9)])), [""; 0]);
    let changed = "sort1: /home/me/sort.py, which it names, changed";
    assert_eq!(run_with(files(&[(script, 4)]))[1], changed);
    assert_eq!(run_with(files(&[]))[1], changed, "it is gone");
}

/// Digests of the only job's description.
fn description_of(text: &str) -> Digest {
    let workflow = parse(text);
    let extracts = ExtractIndex::new(&workflow);
    describe_job_digest(&workflow, JobIndex(0), &[], |volume| extracts.of(volume))
}

#[test]
fn word_moved_to_another_line_is_another_description() {
    let job = |lines: &str| description_of(&format!("job a {{\nexecutable = x\n{lines}\n}}\n"));
    let one = job("arguments = y T=4");
    assert_ne!(one, job("arguments = y\nenvironment = T=4"));
    assert_ne!(one, job("arguments = \"y T=4\""));
    assert_eq!(one, job("arguments =  y  T=4"));
}

#[test]
fn quotes_around_a_pattern_are_another_description() {
    let job = |words: &str| {
        description_of(&format!(
            "volume w scratch 1 MB\njob a {{\nexecutable = x\n}}\nmount w a /w\n\
             extract w {words} bafs://home/r/\n"
        ))
    };
    assert_ne!(job("s*.x"), job("\"s*.x\""));
    assert_ne!(job("p q"), job("\"p q\""));
    assert_eq!(job("p  q"), job("p q"));
}

#[test]
fn removed_last_writer_makes_the_one_before_send_its_result() {
    let chain = "volume v scratch 1 MB\njob map {\nexecutable = m\n}\n\
         job filter {\nexecutable = f\n}\nparent map child filter\n\
         mount v map /v\nmount v filter /v\nextract v x bafs://home/r\n";
    let mut state = EarlierState::after_success();
    state.workflow = parse(chain);
    state.record("map", 1, Vec::new(), &[], &[]);
    state.record("filter", 1, Vec::new(), &[("map", 1)], &["bafs://home/r"]);
    assert_eq!(state.running(), [""; 0]);
    let first = "volume v scratch 1 MB\njob map {\nexecutable = m\n}\n\
         mount v map /v\nextract v x bafs://home/r\n";
    state.workflow = parse(first);
    let unsent = "map: it has not sent its result bafs://home/r";
    assert_eq!(state.running(), [unsent]);
}
