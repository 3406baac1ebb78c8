//! The decision on random workflows, beside one that is made the simple and slow way.

use super::*;

/// Numbers of Park and Miller (1988).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0 * 16_807 % 2_147_483_647;
        self.0 % bound
    }
}

/// A few jobs in a row, each after some of those before, and a few volumes that some of them write
/// and read.
fn random_workflow(numbers: &mut Numbers) -> Workflow {
    let jobs = 2 + numbers.below(5);
    let mut text = String::new();
    for job in 0..jobs {
        text += &format!("job j{job} {{\nexecutable = x\n}}\n");
        for before in 0..job {
            if numbers.below(2) == 0 {
                text += &format!("parent j{before} child j{job}\n");
            }
        }
    }
    for volume in 0..1 + numbers.below(4) {
        text += &format!("volume v{volume} scratch 1 MB\n");
        // Users of a volume follow each other.
        let mut last = None;
        for job in 0..jobs {
            if numbers.below(2) == 0 {
                continue;
            }
            let mode = if last.is_none() || numbers.below(2) == 0 {
                ""
            } else {
                " ro"
            };
            text += &format!("mount v{volume} j{job} /v{volume}{mode}\n");
            if let Some(last) = last {
                text += &format!("parent j{last} child j{job}\n");
            }
            last = Some(job);
        }
    }
    parse(&text)
}

/// The same by applying the rules to all jobs until nothing changes.
fn decide_naively(
    workflow: &Workflow,
    forced: &BTreeSet<u32>,
    kept: &BTreeMap<VolumeIndex, BTreeSet<u32>>,
) -> (BTreeSet<u32>, BTreeSet<VolumeIndex>) {
    let mut rank = vec![0; workflow.jobs.len()];
    for (position, job) in workflow.topological_order().iter().enumerate() {
        rank[job.as_usize()] = position;
    }
    let writes = |job: u32, volume: VolumeIndex| {
        let mut mounts = workflow.jobs[job as usize].mounts.iter();
        mounts.any(|mount| mount.volume == volume && mount.writable)
    };
    let (mut running, mut usable) = (forced.clone(), kept.clone());
    loop {
        let before = (running.clone(), usable.clone());
        for (index, volume) in workflow.volumes.iter().zip(0u32..).map(|(v, i)| (i, v)) {
            let index = VolumeIndex(index);
            assert!(matches!(volume.kind, VolumeKind::Scratch { .. }));
            let users: Vec<u32> = volume.users.iter().map(|job| job.0).collect();
            let writers: BTreeSet<u32> = users
                .iter()
                .copied()
                .filter(|job| writes(*job, index))
                .collect();
            for &user in users.iter().filter(|user| before.0.contains(user)) {
                let earlier: BTreeSet<u32> = writers
                    .iter()
                    .copied()
                    .filter(|it| rank[*it as usize] < rank[user as usize])
                    .collect();
                let is_usable = usable
                    .get(&index)
                    .is_some_and(|kept| *kept == earlier && kept.is_disjoint(&before.0));
                if !is_usable {
                    usable.remove(&index);
                }
                let there = usable.get(&index).cloned().unwrap_or_default();
                running.extend(
                    writers
                        .iter()
                        .filter(|it| **it != user && !there.contains(it)),
                );
                if writes(user, index) {
                    let later = |it: &&u32| rank[**it as usize] > rank[user as usize];
                    running.extend(users.iter().filter(later));
                }
            }
        }
        for (job, index) in workflow.jobs.iter().zip(0u32..) {
            if job
                .parents
                .iter()
                .any(|parent| before.0.contains(&parent.0))
            {
                running.insert(index);
            }
        }
        if (&running, &usable) == (&before.0, &before.1) {
            let is_used = |volume: &VolumeIndex| {
                let mut users = workflow.volume(*volume).users.iter();
                users.any(|user| running.contains(&user.0))
            };
            let used = usable.into_keys().filter(is_used).collect();
            return (running, used);
        }
    }
}

#[test]
fn decision_equals_a_naive_model() {
    let mut adopted_in_all = 0;
    for seed in 1..3_000 {
        let mut numbers = Numbers(seed);
        let workflow = random_workflow(&mut numbers);
        let count = u64::try_from(workflow.jobs.len()).expect("few");
        let forced: BTreeSet<u32> = (0..2)
            .map(|_| u32::try_from(numbers.below(count)).expect("few"))
            .collect();
        let mut records = BTreeMap::new();
        for job in &workflow.jobs {
            let record = JobRecord {
                job: job.name.clone(),
                execution: ExecutionId(1),
                description: Digest([0; 32]),
                program: None,
                files: NamedFiles::default(),
                sizes: Vec::new(),
                sources: Vec::new(),
                producers: Vec::new(),
                results: Vec::new(),
            };
            records.insert(job.name.clone(), record);
        }
        let (mut kept, mut kept_of) = (Vec::new(), BTreeMap::new());
        for (volume, index) in workflow.volumes.iter().zip(0u32..) {
            let index = VolumeIndex(index);
            let is_writer = |job: &&JobIndex| {
                let mut mounts = workflow.job(**job).mounts.iter();
                mounts.any(|mount| mount.volume == index && mount.writable)
            };
            let writers: Vec<JobIndex> = volume.users.iter().filter(is_writer).copied().collect();
            let there = numbers.below(writers.len() as u64 + 2) as usize;
            let there: Vec<JobIndex> = writers.into_iter().take(there).collect();
            if there.is_empty() {
                continue;
            }
            kept_of.insert(index, there.iter().map(|job| job.0).collect());
            let written = there.iter().map(|job| workflow.job(*job).name.clone());
            kept.push(KeptVolume {
                id: VolumeId(u128::from(index.0)),
                name: volume.name.clone(),
                server: ServerId(1),
                size: Space {
                    bytes: u64::MAX,
                    files: u64::MAX,
                },
                writers: written.map(|name| (name, ExecutionId(1))).collect(),
            });
        }
        let own = (0..workflow.jobs.len() as u32)
            .map(|job| forced.contains(&job).then_some(RunReason::Forced))
            .collect();
        let decided = decide_jobs(&workflow, &records, own, &kept);
        let running: BTreeSet<u32> = decided.running().map(|job| job.0).collect();
        let adopted: BTreeSet<VolumeIndex> = decided.adopted.keys().copied().collect();
        adopted_in_all += adopted.len();
        let naive = decide_naively(&workflow, &forced, &kept_of);
        assert_eq!((running, adopted), naive, "seed {seed}");
    }
    assert!(adopted_in_all > 100, "kept volumes are used at times");
}
