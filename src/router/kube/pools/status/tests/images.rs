//! What images occupy, and the volumes that grow most.

use super::*;
use crate::agent::ImageUsage;
use crate::agent::image_usage::{Growth, Volume};

fn counted(own: i64, at: i64, grown: Option<i64>) -> Shown {
    let seconds = |at| time(at).as_second();
    Shown {
        images: Some(ImageUsage {
            own_bytes: own,
            shared_bytes: 2,
            snapshot_bytes: 3,
            undivided_bytes: 4,
            unmeasured_volumes: 1,
            measured_at: seconds(at),
            growth: grown.map(|grown_bytes| Growth {
                volumes: vec![Volume {
                    volume_id: format!("{}.{}", id(1), id(7)),
                    grown_bytes,
                    since: seconds(0),
                }],
            }),
        }),
        ..shown(1)
    }
}

/// (own bytes, the time of the numbers, grown bytes, the time of these), as far as they are known.
fn known(sky: &Sky) -> [Option<(i64, i64)>; 2] {
    let status = sky.status(1);
    let from = |at: &Time| at.0.as_second() - time(0).as_second();
    let images = status.images.as_ref();
    let images = images.map(|it| (it.own_bytes, from(&it.measured_at)));
    let growth = status.growth.as_ref();
    let growth = growth.map(|it| (it.volumes[0].grown_bytes, from(&it.measured_at)));
    [images, growth]
}

#[test]
fn what_an_agent_has_counted_stays_until_it_has_counted_again() {
    let mut sky = Sky::new();
    // An agent of an earlier release.
    sky.says("a", vec![shown(1)]);
    sky.write();
    assert_eq!(known(&sky), [None, None]);
    sky.now += 100;
    sky.says("a", vec![counted(10, 90, Some(5))]);
    sky.write();
    assert_eq!(known(&sky), [Some((10, 90)), Some((5, 90))]);
    let status = sky.status(1);
    let id = &status.growth.as_ref().unwrap().volumes[0].id;
    assert_eq!(*id, format!("{}.{}", super::id(1), super::id(7)));

    // Its agent is restarted: at first it has counted nothing, and then it does not know what grows.
    sky.now += 100;
    sky.says("a", vec![shown(1)]);
    sky.write();
    assert_eq!(known(&sky), [Some((10, 90)), Some((5, 90))]);
    sky.now += 100;
    sky.says("a", vec![counted(11, 290, None)]);
    sky.write();
    assert_eq!(known(&sky), [Some((11, 290)), Some((5, 90))]);
    sky.is_silent("a");
    sky.now += 100;
    sky.write();
    assert_eq!(sky.status(1).health, Health::Unreachable);
    assert_eq!(known(&sky), [Some((11, 290)), Some((5, 90))]);
}

#[test]
fn counts_are_written_with_the_other_numbers_once_a_minute() {
    let mut sky = Sky::new();
    sky.says("a", vec![counted(10, 0, Some(1))]);
    sky.write();
    sky.now += 30;
    sky.says("a", vec![counted(20, 20, Some(11))]);
    assert_eq!(sky.changes(), []);
    sky.now += 31;
    sky.says("a", vec![counted(20, 20, Some(11))]);
    sky.write();
    assert_eq!(known(&sky), [Some((20, 20)), Some((11, 20))]);
}
