//! Schedules as a status page shows them.

use std::sync::PoisonError;

use ::kube::ResourceExt;

use super::execute::is_problem;
use super::object::SnapshotSchedule;
use super::{InCluster, SCHEDULES};
use crate::telemetry::page::world::Schedule;

impl InCluster {
    /// All schedules; `None` before they are read, or if they are not executed.
    pub(in crate::router::kube) fn shown_schedules(&self) -> Option<Vec<Schedule>> {
        let all = self.schedules.read();
        let all = all.unwrap_or_else(PoisonError::into_inner);
        let is_known = self.following.is_complete(SCHEDULES);
        is_known.then(|| all.now().values().map(schedule).collect())
    }
}

fn schedule(object: &SnapshotSchedule) -> Schedule {
    let (spec, status) = (&object.spec, object.status.clone().unwrap_or_default());
    let times = match (&spec.cron, &spec.every) {
        (Some(cron), _) => format!("cron {cron}"),
        (None, Some(every)) => format!("every {every}"),
        (None, None) => String::new(),
    };
    let problems = status.conditions.iter().filter(|one| is_problem(one));
    Schedule {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
        uid: object.uid().unwrap_or_default(),
        is_group: spec.selector.is_some(),
        timetable: match &spec.time_zone {
            Some(zone) => format!("{times}, {zone}"),
            None => times,
        },
        is_suspended: spec.suspend,
        last_cut: status.last_cut_slot.map(|slot| slot.0),
        level: status.level,
        next_slot: status.next_slot,
        overdue: status.overdue_since.map(|since| since.0),
        missed: status.missed,
        skipped: status.skipped_slots.iter().map(|slot| slot.0).collect(),
        failing: problems
            .map(|one| {
                let what = format!("{}: {}", one.reason, one.message);
                (one.last_transition_time.0, what)
            })
            .collect(),
    }
}
