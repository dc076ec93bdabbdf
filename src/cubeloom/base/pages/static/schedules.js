"use strict";
// Schedules: the figures of each, and their timelines on one scale.
cubeloom.views.schedules = (into, data) => {
  into.replaceChildren(
    cubeloom.card("Compared", cubeloom.summary(data.timelines)),
    cubeloom.card("Timelines", cubeloom.timelines(data.timelines)));
};
