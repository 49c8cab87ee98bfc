-- Return whether the session may publish and decide for this producer group: its role may write decisions itself, or is
-- (a member of) a role that has the group in the table publisher (docs/decisions/235).
--
-- Inside a function with its owner's rights, current_user is the owner. The role of the session is the one of SET ROLE,
-- else the one that logged in.
CREATE OR REPLACE FUNCTION may_publish_for(wanted text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    session_role CONSTANT name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF has_table_privilege(session_role, 'op_log', 'INSERT') THEN
        RETURN true;
    END IF;
    RETURN EXISTS (SELECT FROM publisher
                   WHERE producer_group = wanted AND pg_has_role(session_role, to_regrole(quote_ident(role)), 'USAGE'));
END $$;
