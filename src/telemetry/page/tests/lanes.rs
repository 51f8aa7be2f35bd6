//! Lanes of snapshots.

use super::*;

#[test]
fn cuts_are_on_a_lane_by_time_with_a_table() {
    let mut world = well(1, 0);
    world.schedules = Some(vec![Schedule {
        overdue: Some(ago(25)),
        missed: 2,
        ..schedule()
    }]);
    let failed = Cut {
        state: CutState::Failed,
        error: Some("no space".into()),
        ..cut(75, "")
    };
    let strange = Cut {
        schedule: None,
        ..cut(5, "crash")
    };
    world.cuts.all = vec![
        cut(100, "application"),
        cut(50, "filesystem"),
        failed,
        strange,
    ];
    let shown = view(&world, "").groups;
    let group = &shown.first[0];
    assert_eq!(group.name, "shop/pg");
    let lane = &group.lanes.first[0];
    let places: Vec<_> = lane
        .cuts
        .first
        .iter()
        .map(|cut| (cut.x, cut.level))
        .collect();
    assert_eq!(
        places,
        [(500, "filesystem"), (250, "unknown"), (0, "application")]
    );
    assert_eq!(lane.overdue_x, Some(750));
    assert_eq!(shown.first[1].name, "shop", "those without a schedule");
    let text = page(&world, "");
    let lane = text.split("<svg class=\"lane\"").nth(1).unwrap();
    let lane = lane.split("</svg>").next().unwrap();
    assert!(
        lane.contains("translate(0 16)\" class=\"application\"><circle"),
        "{lane}"
    );
    assert!(
        lane.contains("translate(250 16)\" class=\"hollow\""),
        "{lane}"
    );
    assert!(lane.contains("x=\"750\" y=\"3\" width=\"250\""), "{lane}");
    for expected in [
        "Skipped slots: 2.",
        "failed: no space",
        "Overdue since",
        "pg-50</td>",
    ] {
        assert!(text.contains(expected), "{expected}");
    }
}

#[test]
fn a_skipped_slot_is_a_gap_in_the_lane_and_a_row_of_the_table() {
    let mut world = well(1, 0);
    world.schedules = Some(vec![Schedule {
        skipped: vec![ago(120), ago(60)],
        ..schedule()
    }]);
    world.cuts.all = vec![cut(180, "crash"), cut(30, "crash")];
    let lanes = view(&world, "").groups.first.remove(0).lanes;
    let rows: Vec<_> = lanes.first[0]
        .cuts
        .first
        .iter()
        .map(|row| (row.x, row.state))
        .collect();
    let expected = [
        (833, "ready"),
        (666, "skipped"),
        (333, "skipped"),
        (0, "ready"),
    ];
    assert_eq!(rows, expected);
    let text = page(&world, "");
    assert!(
        text.contains("translate(333 16)\" class=\"gap\"><path"),
        "{text}"
    );
    let of = |state: &str| {
        text.matches(&format!("data-name=\"State\">{state}</td>"))
            .count()
    };
    assert_eq!((of("ready"), of("skipped")), (2, 2), "{text}");
    // Without any snapshot the gaps are all that there is.
    world.cuts.all.clear();
    let lanes = view(&world, "").groups.first.remove(0).lanes;
    assert_eq!((lanes.count, lanes.first[0].cuts.count), (1, 2));
}

#[test]
fn each_claim_of_a_schedule_has_a_lane_and_a_page_has_a_limited_number_of_them() {
    let mut world = well(1, 0);
    let many = |name: &str, uid: &str| Schedule {
        name: name.into(),
        uid: uid.into(),
        is_group: false,
        ..schedule()
    };
    world.schedules = Some(vec![many("a", "1"), many("b", "2"), many("c", "3")]);
    let single = |schedule: &str, claim: usize, minutes: i64| Cut {
        schedule: Some(schedule.into()),
        claim: Some(format!("data-{claim:02}")),
        ..cut(minutes, "filesystem")
    };
    let claims = [("1", 15), ("2", 15), ("3", 2)];
    let all = claims.iter().flat_map(|(schedule, claims)| {
        let claims = 0..*claims;
        claims.flat_map(|claim| [5, 65].map(|minutes| single(schedule, claim, minutes)))
    });
    world.cuts.all = all.collect();
    let counts = |search: &str| -> Vec<(usize, usize)> {
        let groups = view(&world, search).groups.first.into_iter();
        groups
            .map(|group| (group.lanes.first.len(), group.lanes.count))
            .collect()
    };
    assert_eq!(counts(""), [(15, 15), (5, 15), (1, 2)]);
    assert_eq!(counts("shop/b"), [(15, 15)]);
    assert_eq!(counts("shop/data-14"), [(1, 1), (1, 1)]);
    let group = view(&world, "shop/b").groups.first.remove(0);
    let lane = &group.lanes.first[3];
    assert_eq!(lane.claim.as_deref(), Some("data-03"));
    assert_eq!(lane.cuts.count, 2);
    let text = page(&world, "");
    assert_eq!(text.matches("class=\"lane\"").count(), 21);
    assert!(text.contains("<h4>Claim data-03</h4>"), "{text}");
    assert!(
        text.contains("10 more claims are not drawn; search"),
        "{text}"
    );
}
