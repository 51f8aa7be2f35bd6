//! A cut that is not possible as requested is refused before any application is disturbed.

use super::*;
use crate::cut::coordinator::Used;
use crate::cut::guard::MAX_MEMBERS;

/// Asserts that a cut has frozen no file system and run no hook.
fn assert_undisturbed(world: &World) {
    let looks = |line: &String| line.starts_with("count") || line.starts_with("root");
    assert!(world.log().iter().all(looks), "{:?}", world.log());
    world.assert_still();
}

#[test]
fn several_volumes_in_use_are_refused_unless_all_of_them_can_be_frozen() {
    let volume = |raw: bool| Used {
        volume_id: if raw { "r" } else { "a" }.into(),
        claim: None,
        unsuspendable_reason: raw.then(|| "restart its pod".into()),
    };
    let (raw, mounted) = (volume(true), volume(false));
    let degrade = SnapshotParameters {
        on_quiesce_failure: OnQuiesceFailure::Degrade(Level::Crash),
        ..application()
    };
    let admit = |used: &[&Used], level, parameters: &SnapshotParameters| {
        let used: Vec<Used> = used.iter().copied().cloned().collect();
        coordinator::admit(&used, level, parameters).map_err(|error| chain(&error))
    };
    let (filesystem, crash) = (Level::Filesystem, Level::Crash);
    for used in [[&raw, &mounted], [&raw, &raw], [&mounted, &raw]] {
        let error = admit(&used, filesystem, &application()).unwrap_err();
        assert!(error.contains("raw block device"), "{error}");
        assert!(error.contains("restart its pod"), "{error}");
    }
    let two = [&mounted, &mounted];
    let error = admit(&two, crash, &application()).unwrap_err();
    assert!(error.contains("does not freeze"), "{error}");
    let error = admit(&two, filesystem, &degrade).unwrap_err();
    assert!(error.contains("onQuiesceFailure"), "{error}");
    admit(&two, filesystem, &application()).unwrap();
    for one in [&raw, &mounted] {
        admit(&[one], crash, &degrade).unwrap();
    }
}

#[test]
fn an_image_in_too_many_extents_is_refused_before_anything_is_frozen() {
    let refuse =
        |members: &[TestVolume], extents: u64, parameters: SnapshotParameters, words: &str| {
            let world = World::with_hooks(&["db"]);
            world.set_extents(extents);
            let level = parameters.consistency;
            let error = attempt(&world, members, level, &parameters).unwrap_err();
            assert!(matches!(error, Error::Refused { .. }), "{error:?}");
            assert!(chain(&error).contains(words), "{error}");
            assert_undisturbed(&world);
        };
    let two = [mounted("a"), mounted("b")];
    let few = SnapshotParameters {
        max_extents: Some(9),
        ..application()
    };
    refuse(
        &two,
        10,
        few,
        "volume a: its image has 10 extents, but the class allows 9 (maxExtents)",
    );
    let short = SnapshotParameters {
        freeze_timeout: Duration::from_millis(100),
        ..application()
    };
    // In mode `Ahead`, 2 us for each extent of both volumes; in a whole clone, 15 us.
    refuse(
        &two,
        25_001,
        short.clone(),
        "longer than freezeTimeout (100 ms)",
    );
    let raw_and_short = SnapshotParameters {
        consistency: Level::Filesystem,
        ..short
    };
    refuse(
        &[raw("r")],
        6_667,
        raw_and_short.clone(),
        "volume r: its image has 6667 extents",
    );
    let world = World::default();
    world.set_extents(6_666);
    attempt(&world, &[raw("r")], Level::Filesystem, &raw_and_short).unwrap();
    world.set_extents(25_000);
    attempt(&world, &two, Level::Filesystem, &raw_and_short).unwrap();
}

#[test]
fn more_file_systems_than_can_be_frozen_together_are_refused_before_anybody_is_disturbed() {
    let members: Vec<TestVolume> = (0..=MAX_MEMBERS)
        .map(|n| mounted(&format!("v{n}")))
        .collect();
    let world = World::with_hooks(&["db"]);
    let parameters = application();
    let cut = |members: &[TestVolume]| attempt(&world, members, Level::Application, &parameters);
    let error = cut(&members).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    let said = format!("{} of its volumes are in use on this node", MAX_MEMBERS + 1);
    assert!(chain(&error).contains(&said), "{error}");
    assert_undisturbed(&world);
    cut(&members[1..]).unwrap();
}

#[test]
fn nodes_are_frozen_at_the_same_time_so_that_the_slowest_one_counts() {
    let parameters = SnapshotParameters {
        freeze_timeout: Duration::from_secs(1),
        ..SnapshotParameters::default()
    };
    let cut = |stalls: [u64; 3]| {
        let world = World::default();
        let meet = Arc::new(Barrier::new(3));
        let each = ["x", "y", "z"].into_iter().zip(stalls);
        let participants = each.map(|(name, stall)| {
            let far = Far {
                name,
                world: world.clone(),
                meet: meet.clone(),
                fails: false,
                stall: Duration::from_millis(stall),
                aborted: None,
            };
            Box::new(far) as Box<dyn Participant>
        });
        let context = coordinator::CutContext {
            hooks: &world,
            now_nanos: &|| fakes::CUT_AT,
            disturbed: &Cell::new(false),
        };
        let spec = CutSpec {
            level: Level::Filesystem,
            parameters: &parameters,
            targets: &[],
        };
        coordinator::run(&context, participants.collect(), &spec)
    };
    cut([400, 900, 500]).unwrap();
    for (slowest, stalls) in [("x", [1001, 1, 1]), ("y", [1, 1002, 1001])] {
        let error = cut(stalls).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        let said = chain(&error).to_string();
        assert!(said.contains(&format!("volume {slowest}")), "{said}");
    }
}
