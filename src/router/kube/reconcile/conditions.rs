//! Conditions of a status, as the API conventions of Kubernetes define them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// Conditions to be written over those that an object has. One whose status has not changed keeps
/// the time of its last transition; each names the generation of the spec that it was decided from.
pub(in crate::router::kube) fn with_transitions(
    mut conditions: Vec<Condition>,
    before: &[Condition],
    generation: Option<i64>,
) -> Vec<Condition> {
    for condition in &mut conditions {
        condition.observed_generation = generation;
        let same =
            |old: &&Condition| old.type_ == condition.type_ && old.status == condition.status;
        if let Some(same) = before.iter().find(same) {
            condition.last_transition_time = same.last_transition_time.clone();
        }
    }
    conditions
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn condition(type_: &str, status: &str, second: i64) -> Condition {
        Condition {
            last_transition_time: Time(Timestamp::from_second(second).unwrap()),
            message: String::new(),
            observed_generation: None,
            reason: "Because".into(),
            status: status.into(),
            type_: type_.into(),
        }
    }

    #[test]
    fn a_condition_keeps_its_time_until_its_status_changes() {
        let before = [condition("A", "True", 1), condition("B", "True", 1)];
        let now = vec![
            condition("A", "True", 9),
            condition("B", "False", 9),
            condition("C", "True", 9),
        ];
        let now = with_transitions(now, &before, Some(3));
        let times = now.iter().map(|one| one.last_transition_time.0.as_second());
        assert_eq!(times.collect::<Vec<_>>(), [1, 9, 9]);
        assert!(now.iter().all(|one| one.observed_generation == Some(3)));
    }
}
