-- Change 19: functions have files of their own, of which the last change creates each in its present form.
--
-- These were replaced before a release called them. Only databases that unreleased code installed have them.

DROP FUNCTION IF EXISTS tick_v15, begin_life_v15;
